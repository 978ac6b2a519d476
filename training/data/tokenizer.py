"""Text to token ids and back, without loss.

Every kind shares the special tokens `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3, ends each text with `</s>`, pads on the
right, and is one `tokenizer.json` that AutoTokenizer loads without this package.

| kind       | a token is                                           | decode(encode(s)) is               |
|------------|------------------------------------------------------|------------------------------------|
| bpe        | a piece of a word, or a byte of an unseen character  | s, with U+2581 turned into a space |
| unigram    | the same                                             | the same                           |
| characters | a character, or a byte of an unseen one              | s                                  |
| units      | whatever `unit_pattern` matches                      | the units joined by single spaces  |

The mark U+2581 (▁) stands for a space inside `bpe` and `unigram` pieces, as in SentencePiece.

A literal `</s>` or `<pad>` in a text stays text: special tokens are not looked for in it, and `<` is cut off from what
follows before pieces are looked up, so no piece can be spelled like a special token or a byte (`<0x41>`).
"""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import TokenizerOptions
from metaphrase.training.data.cache import fingerprint, new_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from metaphrase.training.data.corpus import Corpus
    from metaphrase.training.data.stream_mixture import StreamedMixture
    from metaphrase.training.data.streaming import StreamedCorpus

PAD, START, END, UNKNOWN = SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MAX_LENGTH = 1024
"""`model_max_length`: no text is cut at it unless the caller asks for truncation."""

PIECES = r"<|▁?[\p{L}\p{M}]+|▁?\p{N}|▁?[^\s▁<\p{L}\p{M}\p{N}]+"
"""What a piece may span: one word, one digit, or one run of punctuation, each with the space before it; `<` alone."""

Texts = Iterable[str] | Iterable[list[str]]


def train_tokenizer(texts: Texts, options: TokenizerOptions) -> PreTrainedTokenizerFast:
    """Learns a vocabulary from texts, given one by one or in lists.

    The same texts in the same order give the same tokenizer.

    Raises:
        MetaphraseError: the vocabulary is too small to hold the special tokens and bytes, the pattern is not a regular
            expression, or there is no text.
    """
    smallest = len(SPECIAL) + (0 if options.kind == "units" else len(BYTES)) + 1
    if options.vocab_size < smallest:
        raise MetaphraseError(
            f"tokenizer.vocab_size {options.vocab_size} is too small for kind {options.kind}: special tokens"
            f"{'' if options.kind == 'units' else ' and the 256 bytes'} alone need {smallest - 1}"
        )
    train = {"bpe": _train_bpe, "unigram": _train_unigram, "characters": _train_characters, "units": _train_units}
    return wrap(train[options.kind](texts, options))


def prepare_tokenizer(
    corpus: Corpus | StreamedCorpus | StreamedMixture, options: TokenizerOptions, cache_dir: Path | None
) -> PreTrainedTokenizerFast:
    """The tokenizer that the options ask for: loaded from `options.path`, or from the cache, or trained.

    The corpus' tags are tokens of it, and count into `options.vocab_size`.
    """
    tags = corpus.tags
    if options.path is not None:
        return add_tags(load_tokenizer(options.path), tags)
    smaller = replace(options, vocab_size=options.vocab_size - len(tags), dropout=0.0)  # dropout is no part of it
    if cache_dir is None:
        return add_tags(train_tokenizer(corpus.texts(), smaller), tags)
    folder = Path(cache_dir) / f"tokenizer-{fingerprint('tokenizer', corpus.fingerprint, smaller, tags)}"
    if not (folder / "tokenizer.json").is_file():
        with new_folder(folder) as unfinished:
            add_tags(train_tokenizer(corpus.texts(), smaller), tags).save_pretrained(unfinished)
    return load_tokenizer(folder)


def add_tags(tokenizer: PreTrainedTokenizerFast, tags: list[str]) -> PreTrainedTokenizerFast:
    """Makes each tag one token, found wherever it stands in a text, together with the spaces after it."""
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(tag, rstrip=True, normalized=False, special=False) for tag in tags])
    return tokenizer


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Loads a tokenizer from a folder (or a Hub id) and checks that a model can be trained with it.

    Raises:
        MetaphraseError: there is none, or it lacks a pad or end token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise MetaphraseError(f"no tokenizer loads from {path}: {' '.join(str(error).split())}") from error
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, name) is None:
            raise MetaphraseError(f"the tokenizer in {path} has no {name}")
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Adds the end token to every text, and dresses the tokenizer for transformers."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="right",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
    )


def _dress_pieces(tokenizer: Tokenizer) -> None:
    """The way of `bpe` and `unigram`: a space becomes ▁ and joins the piece after it; one is put before the text."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _train_bpe(texts: Texts, options: TokenizerOptions) -> Tokenizer:
    from tokenizers import Tokenizer, models, trainers

    learner = Tokenizer(models.BPE())
    _dress_pieces(learner)
    size = options.vocab_size - len(SPECIAL) - len(BYTES)
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=max(size // 2, 1), show_progress=False)
    learner.train_from_iterator(_not_empty(texts), trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    vocabulary = {piece: number for number, piece in enumerate(chain(SPECIAL, BYTES, pieces))}
    merges = [tuple(merge) for merge in learned["merges"]]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN, byte_fallback=True)
    tokenizer = Tokenizer(model)
    _dress_pieces(tokenizer)
    return tokenizer


def _train_unigram(texts: Texts, options: TokenizerOptions) -> Tokenizer:
    """Learns pieces with sentencepiece, whose trainer gives the same each time; that of `tokenizers` does not."""
    from tokenizers import Tokenizer, models

    learned = _learn_pieces(texts, options.vocab_size - len(SPECIAL) - len(BYTES))
    lowest = min(score for _, score in learned)
    rare = [(token, lowest) for token in chain(SPECIAL, BYTES)]  # never found in text: see the head of this file
    model = models.Unigram(rare + learned, unk_id=SPECIAL.index(UNKNOWN), byte_fallback=True)
    tokenizer = Tokenizer(model)
    _dress_pieces(tokenizer)
    return tokenizer


def _learn_pieces(texts: Texts, size: int) -> list[tuple[str, float]]:
    """Pieces with their log-probabilities, learned from the counted words of the texts."""
    from tokenizers import Tokenizer, models

    try:
        import sentencepiece
    except ImportError:
        raise MetaphraseError(
            "a tokenizer of kind unigram is trained with sentencepiece: pip install metaphrase[unigram]"
        ) from None
    way = Tokenizer(models.Unigram())
    _dress_pieces(way)
    counts: Counter[str] = Counter()
    for text in _flat(_not_empty(texts)):
        counts.update(word for word, _ in way.pre_tokenizer.pre_tokenize_str(way.normalizer.normalize_str(text)))
    words = sorted(word for word in counts if not any(mark in word for mark in "\t\n\r\0"))
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as folder:
        table, model = Path(folder) / "words.tsv", io.BytesIO()
        table.write_bytes("".join(f"{word}\t{counts[word]}\n" for word in words).encode())
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=str(table), input_format="tsv", model_writer=model, model_type="unigram", vocab_size=size + 1,
                hard_vocab_limit=False, character_coverage=0.9999, normalization_rule_name="identity",
                add_dummy_prefix=False, remove_extra_whitespaces=False, split_by_unicode_script=False,
                split_by_number=False, max_sentence_length=1 << 20, bos_id=-1, eos_id=-1, pad_id=-1, unk_id=0,
                num_threads=1, minloglevel=2,
            )  # fmt: skip
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise MetaphraseError(f"no unigram tokenizer of {size} pieces comes of these texts: {reason}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [(processor.id_to_piece(number), processor.get_score(number)) for number in range(1, len(processor))]


def _train_characters(texts: Texts, options: TokenizerOptions) -> Tokenizer:
    """A BPE without merges: each character of the vocabulary is a token, any other falls back to its bytes."""
    from tokenizers import Tokenizer, decoders, models

    counts: Counter[str] = Counter()
    for text in _flat(_not_empty(texts)):
        counts.update(text)
    characters = _most_common(counts, options.vocab_size - len(SPECIAL) - len(BYTES))
    vocabulary = {token: number for number, token in enumerate(chain(SPECIAL, BYTES, characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _train_units(texts: Texts, options: TokenizerOptions) -> Tokenizer:
    """Words of a closed vocabulary. A unit spelled like a special token is cut after its `<`, and so stays text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    special = "|".join(token[1:] for token in SPECIAL)
    try:
        cut = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(f"<(?={special})"), "isolated"),
                pre_tokenizers.Split(Regex(options.unit_pattern), "removed", invert=True),
            ]
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise MetaphraseError(
            f"tokenizer.unit_pattern {options.unit_pattern!r} is no regular expression: {error}"
        ) from None
    counts: Counter[str] = Counter()
    for text in _flat(_not_empty(texts)):
        counts.update(unit for unit, _ in cut.pre_tokenize_str(text))
    if not counts:
        raise MetaphraseError(f"tokenizer.unit_pattern {options.unit_pattern!r} matches nothing in the training texts")
    units = _most_common(counts, options.vocab_size - len(SPECIAL))
    vocabulary = {token: number for number, token in enumerate(chain(SPECIAL, units))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = cut
    return tokenizer


def _most_common(counts: Counter[str], size: int) -> list[str]:
    """The most frequent keys; equal counts in the order of code points, so that the order of texts does not matter."""
    return sorted(sorted(counts), key=counts.get, reverse=True)[:size]


def _flat(texts: Texts) -> Iterator[str]:
    for text in texts:
        yield from (text,) if isinstance(text, str) else text


def _not_empty(texts: Texts) -> Iterator[str] | Iterator[list[str]]:
    """The same texts, with an error where there is none."""
    iterator = iter(texts)
    first = next(iterator, None)
    if first is None:
        raise MetaphraseError("there is no text to train a tokenizer on")
    return chain([first], iterator)
