"""`python child.py`: call one function of a test file in a process of its own, with the environment it was given.

Standard input holds `{"file", "function", "arguments", "blocked", "answer"}` as JSON; the function's value goes to the
file `answer`. Packages in `blocked` cannot be imported, as on a machine where they are not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class Blocker(importlib.abc.MetaPathFinder):
    """Makes packages look uninstalled, whichever finder would know them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def main() -> None:
    task = json.load(sys.stdin)
    sys.meta_path.insert(0, Blocker(task["blocked"]))
    spec = importlib.util.spec_from_file_location("client_code", task["file"])
    assert spec is not None and spec.loader is not None
    module = sys.modules["client_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = getattr(module, task["function"])(**task["arguments"])
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in task["blocked"])
    assert not loaded, f"blocked, but imported: {loaded}"
    Path(task["answer"]).write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    main()
