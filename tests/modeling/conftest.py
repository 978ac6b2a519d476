"""Keeps torch's compiler from telling pytest everything: its trace log makes compilation ten times as slow."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True, scope="session")
def quiet_compiler() -> None:
    trace = logging.getLogger("torch.__trace")
    trace.propagate = False
    trace.setLevel(logging.CRITICAL)
