"""transformers' own ModelTesterMixin and ConfigTester: nothing fails, and no more is skipped than with BART.

skips.json holds what is skipped, with the reason, for our classes and for BART's in the same harness. To write it anew:

    METAPHRASE_WRITE_SKIPS=1 python -m pytest tests/peer_suite -m "slow or not slow"
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest
import transformers

from .sources import Unreachable, folder

HERE = Path(__file__).parent
KEPT = HERE / "skips.json"


@cache
def run(peer: str) -> dict[str, tuple[str, str]]:
    """The suite's outcome by test: ("passed" | "failed" | "skipped", reason)."""
    try:
        tests = folder()
    except Unreachable as reason:
        pytest.skip(str(reason))
    report = tests / f"{peer}-{os.getpid()}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={HERE}", str(HERE / "suite.py")]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    environment = {**os.environ, "PEER": peer, "PEER_TESTS": str(tests), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment, cwd=tests)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    outcomes: dict[str, tuple[str, str]] = {}
    for case in cases:
        name = case.get("name").split(" ")[0]
        failure, skip = case.find("failure"), case.find("skipped")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            outcomes[name] = ("failed", (failure.text or "")[-1500:])
        elif skip is not None and outcomes.get(name, ("", ""))[0] != "failed":
            outcomes[name] = ("skipped", without_names(skip.get("message", "")))
        else:
            outcomes.setdefault(name, ("passed", ""))
    report.unlink()
    return outcomes


def without_names(reason: str) -> str:
    """The reason without the class it was met in, so that two models' reasons can be compared."""
    reason = re.sub(r"<class '[^']*'>", "the class", reason.removeprefix("Skipped: "))
    return re.sub(r"\b(Metaphrase|Bart)(Model|ForConditionalGeneration)\b", "the class", reason).strip()


def skipped(outcomes: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {name: reason for name, (outcome, reason) in sorted(outcomes.items()) if outcome == "skipped"}


def keep(peer: str, outcomes: dict[str, tuple[str, str]]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept["transformers"] = transformers.__version__
    kept[peer] = {"run": len(outcomes), "skipped": skipped(outcomes)}
    KEPT.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def test_nothing_fails():
    outcomes = run("metaphrase")
    failed = {name: reason for name, (outcome, reason) in outcomes.items() if outcome == "failed"}
    assert not failed, "\n\n".join(f"{name}: {reason}" for name, reason in failed.items())
    assert sum(outcome == "passed" for outcome, _ in outcomes.values()) >= 90
    if os.environ.get("METAPHRASE_WRITE_SKIPS"):
        keep("metaphrase", outcomes)


def test_what_is_skipped_is_listed_and_no_more_than_barts():
    kept = json.loads(KEPT.read_text())
    if kept["transformers"] != transformers.__version__:
        pytest.skip(
            f"skips.json is of transformers {kept['transformers']}; write it anew for {transformers.__version__}"
        )
    ours = skipped(run("metaphrase"))
    listed, barts = (kept[peer]["skipped"] for peer in ("metaphrase", "bart"))
    assert set(ours) <= set(listed), set(ours) - set(listed)
    assert set(listed) <= set(barts), set(listed) - set(barts)
    assert all(reason for reason in listed.values())


@pytest.mark.slow
def test_barts_skips_are_as_listed():
    outcomes = run("bart")
    if os.environ.get("METAPHRASE_WRITE_SKIPS"):
        keep("bart", outcomes)
    kept = json.loads(KEPT.read_text())
    assert skipped(outcomes) == kept["bart"]["skipped"] or kept["transformers"] != transformers.__version__
