"""Exceptions to sentences: what the command line says when something is wrong that the user can mend."""

from __future__ import annotations

import errno
import re

from .configuration.errors import MetaphraseError

_NO_SPACE = "no space left on the disk"


def sentence_for(error: BaseException) -> str | None:
    """One sentence for a mistake or a lack that the user can mend; None for a fault of the program.

    Exceptions of libraries are known by name, so that no library is imported to tell of an error.
    """
    text = " ".join(str(error).split())
    name = type(error).__name__
    if isinstance(error, MetaphraseError):
        return text
    if isinstance(error, OSError):
        return _os_sentence(error, text)
    if name == "SafetensorError":  # safetensors reports the system's errors as its own
        code = re.search(r"os error (\d+)", text)
        if code and int(code[1]) in (errno.ENOSPC, errno.EDQUOT):
            return f"{_NO_SPACE}; free some, then go on with --resume"
        return f"a safetensors file cannot be read or written: {text}"
    if name == "JSONDecodeError":
        return f"a JSON file is broken: {text}"
    if name in ("OutOfMemoryError", "MemoryError"):
        return "out of memory; a smaller batch needs less: --batches.tokens in training, --batch_tokens in translation"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("metaphrase"):
        return f"the package {error.name} is not installed: pip install {error.name}"
    return None


def _os_sentence(error: OSError, text: str) -> str:
    file = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{_NO_SPACE}{file and ' of'}{file}; free some, then go on with --resume"
    if isinstance(error, FileNotFoundError) and file:
        return f"there is no file or folder{file}"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"no permission to read or write{file}"
    if isinstance(error, IsADirectoryError):
        return f"{file.strip()} is a folder, not a file"
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return f"{file.strip()} is a file, not a folder"
    return text or type(error).__name__
