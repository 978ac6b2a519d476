"""From the options to a source: which files, which dataset, which split."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data import cmudict
from metaphrase.training.data.sources import (
    Columns,
    Dictionary,
    JsonLines,
    PairSource,
    StreamedColumns,
    TextPair,
    Tsv,
    nearest,
)

OTHER_NAMES = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "test_2016_flickr"),  # Multi30k's text files name their test set so
}
"""Names tried for a split whose option was left at its default."""


def find_source(data: DataOptions, role: str) -> PairSource | None:
    """The source of the split that plays `role` ("train", "validation" or "test").

    Returns None where the options name no such split, or name the default one and there is none.

    Raises:
        MetaphraseError: nothing is found under a name that was given; the sentence lists what was looked for.
    """
    split = getattr(data, role)
    if split is None:
        return None
    if isinstance(split, list):
        return _two_files(data, split, role)
    if data.path is None:
        if Path(split).suffix in (".tsv", ".jsonl"):
            return _one_file(Path(split), data)
        if split == role and role != "train":
            return None
        raise MetaphraseError(
            "data.path is not set: give a folder, a dataset id (owner/name), or the two files of data.train"
        )
    names = OTHER_NAMES[role] if split == role else (split,)
    if data.path == cmudict.NAME and not Path(data.path).exists():
        return _dictionary(names, role)
    folder = Path(data.path).expanduser()
    if folder.is_dir() and not _is_saved_dataset(folder):
        return _in_folder(folder, names, data, role)
    if folder.is_file():
        raise MetaphraseError(f"data.path {folder} is a file; give its folder, and the file's name as data.{role}")
    return _in_dataset(folder, names, data, role)


def is_there(data: DataOptions, role: str) -> bool:
    """Whether `find_source` finds a source. Nothing is read, and nothing of a dataset of the Hub is downloaded.

    Raises:
        MetaphraseError: as `find_source` does.
    """
    split, path = getattr(data, role), data.path
    of_the_hub = path is not None and path != cmudict.NAME and not Path(path).expanduser().exists()
    if not of_the_hub or not isinstance(split, str):
        return find_source(data, role) is not None
    names = OTHER_NAMES[role] if split == role else (split,)
    with _told(data.path):
        known = _hub_splits(data)
    return _choose(names, known, data, role) is not None


def _two_files(data: DataOptions, files: list[str], role: str) -> PairSource:
    if len(files) != 2:
        raise MetaphraseError(f"data.{role} lists {len(files)} files, not two: the source's, then the target's")
    folder = Path(data.path).expanduser() if data.path and Path(data.path).expanduser().is_dir() else Path()
    paths = [folder / Path(file).expanduser() for file in files]
    for path in paths:
        if not path.is_file():
            raise MetaphraseError(f"data.{role}: there is no file {path}")
    return TextPair(*paths)


def _one_file(file: Path, data: DataOptions) -> PairSource:
    if not file.is_file():
        raise MetaphraseError(f"there is no file {file}")
    return (Tsv if file.suffix == ".tsv" else JsonLines)(file, data.source, data.target)


def _in_folder(folder: Path, names: tuple[str, ...], data: DataOptions, role: str) -> PairSource | None:
    looked_for: list[str] = []
    for name in names:
        if Path(name).suffix in (".tsv", ".jsonl"):
            return _one_file(folder / name, data)
        pair = folder / f"{name}.{data.source}", folder / f"{name}.{data.target}"
        present = [path.is_file() for path in pair]
        if all(present):
            return TextPair(*pair)
        if any(present):
            there, missing = (pair[0], pair[1]) if present[0] else (pair[1], pair[0])
            raise MetaphraseError(f"there is {there} but no {missing.name} beside it")
        for suffix in (".tsv", ".jsonl"):
            if (folder / f"{name}{suffix}").is_file():
                return _one_file(folder / f"{name}{suffix}", data)
        looked_for += [f"{pair[0].name} with {pair[1].name}", f"{name}.tsv", f"{name}.jsonl"]
    if role != "train" and getattr(data, role) == role:
        return None
    files = sorted(path.name for path in folder.iterdir())
    shown = f"it holds {', '.join(files[:12])}{' …' if len(files) > 12 else ''}" if files else "it is empty"
    raise MetaphraseError(f"the folder {folder} has none of {'; '.join(looked_for)}: {shown}")


def _dictionary(names: tuple[str, ...], role: str) -> PairSource:
    for name in names:
        if name in cmudict.SPLITS:
            cmudict.dictionary_file()
            return Dictionary(name)
    raise MetaphraseError(f"data.{role}: cmudict has no split {names[0]}, only {', '.join(cmudict.SPLITS)}")


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def _in_dataset(folder: Path, names: tuple[str, ...], data: DataOptions, role: str) -> PairSource | None:
    streaming = data.streaming and role == "train"
    splits = _load_saved(folder) if folder.is_dir() else _load_from_hub(data, names, streaming)
    name = _choose(names, splits, data, role)
    if name is None:
        return None
    kind = Columns if hasattr(splits[name], "select") else StreamedColumns
    return kind(splits[name], f"{data.path} ({name})", data.source, data.target)


def _choose(names: tuple[str, ...], known: Collection[str], data: DataOptions, role: str) -> str | None:
    """The first of `names` that a dataset has; None where only a default one is missed."""
    for name in names:
        if name in known:
            return name
    if role != "train" and getattr(data, role) == role:
        return None
    raise MetaphraseError(
        f"{data.path} has no split {names[0]}, only {', '.join(known) or 'none'}{nearest(names[0], known)}"
    )


def _load_saved(folder: Path) -> dict[str, Any]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MetaphraseError(f"the dataset in {folder} cannot be read: {' '.join(str(error).split())}") from error
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _load_from_hub(data: DataOptions, names: tuple[str, ...], streaming: bool) -> dict[str, Any]:
    """Loads only the split that is asked for, so that the test split is read by nothing before its time."""
    with _told(data.path):
        known = _hub_splits(data)
        import datasets

        for name in names:
            if name in known:
                return {name: datasets.load_dataset(data.path, data.config_name, split=name, streaming=streaming)}
        return dict.fromkeys(known)


def _hub_splits(data: DataOptions) -> list[str]:
    """Names of a dataset's splits on the Hub."""
    path = str(data.path)
    if path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise MetaphraseError(f"there is no folder {path}, and it is no dataset id (owner/name)")
    import datasets

    return datasets.get_dataset_split_names(path, data.config_name)


@contextmanager
def _told(path: str | None) -> Iterator[None]:
    """Turns whatever the library raises into one sentence."""
    try:
        yield
    except MetaphraseError:
        raise
    except Exception as error:  # the library raises some twenty kinds here, from ConnectionError to ValueError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MetaphraseError(f"there is no folder {path}, and it does not load as a dataset: {reason}") from error
