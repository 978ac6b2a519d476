# Six words: setup, demo, test, lint, bench, test-slow. Each sets up what it needs; nothing else is to be done by hand.

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint bench clean

VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 8
# The newest interpreter that is here: python3 first, if it will do. Set PYTHON to choose.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done)
# More arguments for pip, for instance another index: make setup PIP_ARGS="--extra-index-url …"
PIP_ARGS ?=
PYTEST := $(BIN)/python -m pytest

help:
	@echo "make setup      a virtual environment in $(VENV) with the pinned versions"
	@echo "make demo       learn to pronounce English from CMUdict in a few minutes, and score it"
	@echo "make test       all tests but the slow ones"
	@echo "make test-slow  the slow ones"
	@echo "make lint       ruff"
	@echo "make bench      speed beside Seq2SeqTrainer and Marian; with PEERS=1 beside Eole too"

setup: $(VENV)/demo.stamp $(VENV)/test.stamp

# One stamp a group of packages, so that the demo need not wait for those of the tests.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and there is none; install it, or set PYTHON=/path/to/python"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks its venv module: install the package python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.stamp: pyproject.toml constraints.txt setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/pronounce.py --minutes $(MINUTES)

# Two workers of one thread each: two cores, and no thread waits for another's.
test: $(VENV)/demo.stamp $(VENV)/test.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PYTEST) -n 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/demo.stamp $(VENV)/test.stamp $(VENV)/olah.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 OLAH_CLI=$(abspath $(VENV))/olah/bin/olah-cli $(PYTEST) -m slow $(ARGS)

# A mirror server that was not written here checks our test Hub. It wants older libraries, hence a place of its own;
# where it cannot be had, its test is skipped.
$(VENV)/olah.stamp: | $(VENV)/bin/python
	$(PYTHON) -m venv $(VENV)/olah
	$(VENV)/olah/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) olah==0.5.4 \
		&& touch $@ || echo "olah cannot be installed; its test will be skipped"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/demo.stamp
	$(BIN)/python benchmarks/training.py $(if $(PEERS),--peers) $(ARGS)
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV) build *.egg-info
