"""The model card: `results.json` of a run, rendered through `model_card.md`. No figure on it is typed by hand.

The metadata block follows the Hub's rules: it holds only what is known, so that no entry is null or not a number, and
only values that the Hub accepts, so that a card never keeps a model from being uploaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.presets import PRESETS

LANGUAGES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el
en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu
ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na
nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so
sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
"""ISO 639-1. Codes of three letters (ISO 639-3) are accepted too, but for those that rather name a side of a corpus."""
SIDES = frozenset(("src", "tgt", "trg", "ref", "hyp", "txt", "inp", "out", "raw", "bpe", "tok", "tsv"))

LICENCES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0
cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl
gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql
ofl-1.1 ncsa unlicense zlib pddl unknown
"""
"""Licences that the Hub knows by name; any other is written as `other` with its name beside it."""

METRIC_NAMES = {
    "sacrebleu": "sacreBLEU",
    "chrf": "chrF",
    "word_error_rate": "word error rate (%)",
    "unit_error_rate": "unit error rate (%)",
}
NO_LICENCE = (
    "No licence is stated. Settle what the training data permits before any other use than research, and before you "
    "hand the model on."
)


def write_card(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes README.md, the card of the model in `folder`, from the content of results.json.

    Entries that `results` lacks, or that are None or not a number, are left out.

    Raises:
        MetaphraseError: if the template is not where the package put it.
    """
    (folder / "README.md").write_text(render_card(results, curves=(folder / "curves.png").is_file()), encoding="utf-8")


def render_card(results: Mapping[str, Any], *, curves: bool = False) -> str:
    """The card as Markdown with its metadata block.

    Args:
        results: content of results.json.
        curves: whether a picture of the learning curves lies beside the card.
    """
    name = _one_line(results.get("name") or results.get("recipe") or "model")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    example = results.get("example") or {}
    content = environment.from_string(_template()).render(
        metadata=card_metadata(results).to_yaml(),
        name=name,
        folder=re.sub(r"[^\w./-]+", "-", name).strip("-") or "model",
        summary=_summary(results),
        example={"source": example.get("source", "A sentence."), "output": _one_line(example.get("output", ""))},
        warning=_commercial_warning(results.get("licence")),
        scores=_score_rows(results),
        untested=not results.get("test"),
        data=_data_rows(results),
        command=results.get("command"),
        training=_training_rows(results),
        curves=curves,
        limits=_limits(results),
    )
    return str(ModelCard(re.sub(r"\n{3,}", "\n\n", content)))


def card_metadata(results: Mapping[str, Any]) -> ModelCardData:
    """The metadata block of a card: only known values, and only such as the Hub accepts."""
    data = results.get("data") or {}
    languages = _languages(data)
    scores = list(_known_scores(results.get("test") or results.get("validation") or {}))
    two = len(languages) >= 2
    optional = {
        "language": languages,
        "datasets": list(dict.fromkeys(one["path"] for one in _corpora(data) if is_hub_id(one.get("path")))),
        "metrics": [metric for metric, _ in scores],
        "pipeline_tag": "translation" if two else None,
        **_licence(results.get("licence")),
    }
    if scores:
        optional["model_name"] = _one_line(results.get("name") or "model")
        optional["eval_results"] = [
            EvalResult(
                task_type="translation" if two else "text2text-generation",
                dataset_type=data["path"] if is_hub_id(data.get("path")) else _slug(data.get("path") or "data"),
                dataset_name=_one_line(Path(str(data.get("path") or "data")).resolve().name) or "data",
                dataset_split="test" if results.get("test") else "validation",
                metric_type=metric,
                metric_name=METRIC_NAMES.get(metric, metric),
                metric_value=round(score["score"], 2),
                metric_args={"signature": score["signature"]} if score.get("signature") else None,
            )
            for metric, score in scores
        ]
    return ModelCardData(
        library_name="transformers", tags=["metaphrase"], **{key: value for key, value in optional.items() if value}
    )


def _template() -> str:
    """`model_card.md`: beside this file in an installed package, at the top of the repository in a checkout."""
    here = Path(__file__).resolve().parent
    for path in (here / "model_card.md", here.parent / "model_card.md"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise MetaphraseError(f"the template model_card.md is not beside {here}; install the package again")


def _summary(results: Mapping[str, Any]) -> str:
    model, data = results.get("model") or {}, results.get("data") or {}
    model = {**PRESETS.get(model.get("preset"), {}), **model}
    size = f" with {model['parameters']:,} parameters" if _is_known(model.get("parameters")) else ""
    layers = [model.get("encoder_layers"), model.get("decoder_layers")]
    stacks = f" ({layers[0]} encoder and {layers[1]} decoder layers)" if all(map(_is_known, layers)) else ""
    sides = data.get("source"), data.get("target")
    task = f" from `{_one_line(sides[0])}` to `{_one_line(sides[1])}`" if all(sides) else ""
    return f"An encoder-decoder Transformer{size}{stacks}, trained from scratch with metaphrase{task}."


def _score_rows(results: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for part in ("test", "validation"):
        scores = results.get(part) or {}
        for metric, score in _known_scores(scores):
            signature = f"`{_one_line(score['signature'])}`" if score.get("signature") else ""
            name = METRIC_NAMES.get(metric, metric)
            rows.append({"set": part, "metric": name, "score": f"{score['score']:.2f}", "signature": signature})
        for metric in ("loss", "perplexity"):
            if _is_known(scores.get(metric)):
                kind = "a target token, without label smoothing"
                rows.append({"set": part, "metric": metric, "score": f"{scores[metric]:.3f}", "signature": kind})
    return rows


def _data_rows(results: Mapping[str, Any]) -> list[dict[str, str]]:
    data = results.get("data") or {}
    tokenizer = results.get("tokenizer") or {}
    dropped = {reason: count for reason, count in (data.get("dropped") or {}).items() if count}
    left_out = ", ".join(f"{count:,} {_one_line(reason)}" for reason, count in dropped.items())
    return _rows(
        ("corpus", _corpus_name(data.get("path"))),
        ("source, target", " → ".join(_one_line(data[side]) for side in ("source", "target") if data.get(side))),
        ("further corpora", ", ".join(map(_further, data.get("more") or []))),
        ("training pairs", data.get("train_pairs")),
        ("pairs left out", left_out or ("none" if "dropped" in data else None)),
        ("validation pairs", data.get("validation_pairs")),
        ("test pairs", data.get("test_pairs")),
        ("tokenizer", tokenizer.get("kind")),
        ("vocabulary", tokenizer.get("vocab_size")),
    )


def _further(corpus: Mapping[str, Any]) -> str:
    sides = " → ".join(_one_line(corpus[side]) for side in ("source", "target") if corpus.get(side))
    return f"{_one_line(_corpus_name(corpus.get('path')))}{sides and f' ({sides})'}"


def _corpus_name(path: Any) -> Any:
    """A Hub id as it is; of a folder its name alone: where it lies on somebody's disk is nobody's business."""
    return path if path is None or is_hub_id(path) else Path(str(path)).resolve().name


def _training_rows(results: Mapping[str, Any]) -> list[dict[str, str]]:
    training = results.get("training") or {}
    versions = results.get("versions") or {}
    hardware = results.get("hardware")
    if isinstance(hardware, Mapping):
        hardware = ", ".join(f"{key} {value}" for key, value in hardware.items() if _is_known(value))
    return _rows(
        ("date", results.get("created")),
        ("preset", (results.get("model") or {}).get("preset")),
        ("updates", training.get("updates")),
        ("epochs", training.get("epochs")),
        ("minutes", training.get("minutes")),
        ("target tokens a second", training.get("tokens_per_second")),
        ("target tokens seen", training.get("target_tokens")),
        ("processes", training.get("processes")),
        ("best update", training.get("best_update")),
        ("weights", training.get("final")),
        ("hardware", hardware),
        ("versions", ", ".join(f"{package} {version}" for package, version in versions.items() if _is_known(version))),
    )


def _rows(*rows: tuple[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": _as_text(value)} for name, value in rows if _is_known(value) and value != ""]


def _limits(results: Mapping[str, Any]) -> str:
    limits = results.get("limits") or "The model knows what its training data showed it, and little else."
    if not isinstance(limits, str):
        limits = " ".join(str(limit) for limit in limits)
    return limits if results.get("licence") else f"{limits}\n\n{NO_LICENCE}"


def _commercial_warning(licence: Any) -> str | None:
    parts = re.split(r"[^a-z]+", str(licence or "").lower())
    if "nc" in parts or "noncommercial" in parts:
        return f"The licence, {licence}, which follows from the training data, forbids it."
    return None


def _licence(licence: Any) -> dict[str, str]:
    if not licence:
        return {}
    known = str(licence).strip().lower()
    return {"license": known} if known in LICENCES.split() else {"license": "other", "license_name": _slug(licence)}


def _corpora(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The main corpus, and further ones."""
    return [data, *(data.get("more") or [])]


def _languages(data: Mapping[str, Any]) -> list[str]:
    """Language codes of the sides of all corpora, a region left off (`pt-BR` is `pt`); none for a side not named so."""
    sides = [one.get(side) for one in _corpora(data) for side in ("source", "target")]
    codes = [re.split(r"[-_]", str(side or ""))[0].lower() for side in sides]
    return list(dict.fromkeys(code for code in codes if _is_language(code)))


def _is_language(code: str) -> bool:
    return code in LANGUAGES.split() or (re.fullmatch(r"[a-z]{3}", code) is not None and code not in SIDES)


def is_hub_id(path: Any) -> bool:
    """`owner/name`, where no folder of that name lies here."""
    return (
        isinstance(path, str)
        and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None
        and not Path(path).exists()
    )


def _known_scores(scores: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for metric, score in scores.items():
        if isinstance(score, Mapping) and _is_known(score.get("score")):
            yield metric, score


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _as_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _one_line(value)


def _one_line(text: Any) -> str:
    """Text for one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _slug(text: Any) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", Path(str(text)).name.lower()).strip("-") or "data"
