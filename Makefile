# Needs Python >= 3.11 with pip, and make; everything else goes into $(VENV).
#
#   make run        set up, and train the small default model on this machine
#   make test       set up, and pass the fast tests (lint, types, tests)
#   make test-all   the full tier: the fast tests and the slow ones
#   make format     rewrite the source as the linter wants it
#   make clean      remove $(VENV) and what the tools left behind

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=

BIN     := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
STAMP   := $(VENV)/.installed
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
PIP     := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: run test test-all check format setup clean
.DEFAULT_GOAL := test

run: $(STAMP)
	$(BIN)/minillm train $(ARGS)

test: check
	$(PYTEST) -m "not slow and not full and not gpu"

test-all: check
	$(PYTEST)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)

# The build backend first, so that it is the pinned one too: pip gives an isolated build the newest.
$(STAMP): pyproject.toml constraints.txt $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"minillm needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e '.[torch,mlx,dev]' $(PLUGINS:%=-e %)
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
