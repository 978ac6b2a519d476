"""The demo: learn to pronounce English from CMUdict, score it beside a published figure, and pronounce a few words.

    python examples/pronounce.py --minutes 6

Two cores and no GPU will do. It is `metaphrase train g2p_cmudict` from Python; the second time it finds its model and
only uses it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import metaphrase

WORDS = ("metaphrase", "attention", "transformer", "encoder", "decoder", "perplexity", "vaswani", "gutenberg")
PUBLISHED = 30.2
"""Word error rate (%) of a Transformer of 3 layers x 256 on CMUdict without stress (cmusphinx/g2p-seq2seq)."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to pronounce English words from CMUdict.")
    parser.add_argument("--minutes", type=float, default=6, help="how long training may take")
    parser.add_argument("--output", type=Path, default=Path("runs/g2p_cmudict"), help="folder of the model")
    parser.add_argument("words", nargs="*", default=WORDS, help="words to pronounce")
    arguments = parser.parse_args()
    folder = learn(arguments.output, arguments.minutes)
    show_scores(folder)
    show_words(folder, arguments.words)
    print(f"\nThe model lies in {folder}; its card is {folder / 'README.md'}.")
    print(f"More words: echo pronounce | metaphrase translate {folder}")


def learn(folder: Path, minutes: float) -> Path:
    """The folder of a trained model: a run that was stopped goes on, one that is whole is taken as it is."""
    if (folder / "results.json").is_file():
        print(f"{folder} holds a trained model already; remove it to train anew.")
        return folder
    options = metaphrase.read_recipe("g2p_cmudict", {"minutes": minutes, "output": str(folder)})
    return metaphrase.train(options, recipe_name="g2p_cmudict", resume=folder.is_dir())


def show_scores(folder: Path) -> None:
    """Error rates on the test split, beside the published figure."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    words, phonemes = results["test"]["word_error_rate"], results["test"]["unit_error_rate"]
    training, model = results["training"], results["model"]
    print(f"\nTest split of CMUdict, {results['data']['test_pairs']:,} words that training has not seen:")
    print(f"  word error rate     {words['score']:5.1f} %   (published, Transformer 3 x 256: {PUBLISHED} %)")
    print(f"  phoneme error rate  {phonemes['score']:5.1f} %")
    print(f"  {model['parameters']:,} parameters, {training['minutes']} minutes, {results['hardware']}")


def show_words(folder: Path, words: list[str]) -> None:
    """A few words and how the model says them."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print()
    for word, sounds in zip(words, metaphrase.translate(model, tokenizer, [w.lower() for w in words]), strict=True):
        print(f"  {word:<14} {sounds}")


if __name__ == "__main__":
    try:
        main()
    except metaphrase.MetaphraseError as error:
        sys.exit(f"pronounce: {error}")
