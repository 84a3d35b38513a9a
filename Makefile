# Needs Python >= 3.11 with pip, and make; everything else goes into $(VENV).
#
#   make run        set up, and train the small default model on this machine
#   make test       set up, and pass the fast tests (lint, types, tests)
#   make test-all   the full tier: the fast tests, then the slow ones
#   make test-nightly  every case of what the full tier tries a sample of
#   make format     rewrite the source as the linter wants it
#   make wheels     build every distribution into dist/, and check what was built
#   make clean      remove $(VENV) and what the tools left behind

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
MAC     := $(filter Darwin-arm64,$(shell uname -s)-$(shell uname -m))
# Of `make run` without ARGS: the recipe for this machine.
RECIPE  ?= $(if $(shell command -v nvidia-smi),small,$(if $(MAC),mac,cpu))

BIN     := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
# Files in their order, and not by their number of tests: the long ones of tests/integration begin first.
# The end lists the slowest tests.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 10
PIP     := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# Editable, and with the pinned build backend: pip gives an isolated build the newest.
EDIT    := $(PIP) --no-build-isolation

# What `make run` needs: one framework, and the plugins that its recipes name.
RUN_FRAMEWORK := $(if $(MAC),mlx,torch)
RUN_PLUGINS   := plugins/minillm_muon plugins/minillm_modded plugins/minillm_lab plugins/minillm_data plugins/minillm_hf
# What is installed: the build backend alone; with it, what a run needs; everything.
BASE  := $(VENV)/.base
RUN   := $(VENV)/.run
STAMP := $(VENV)/.installed
PINS  := pyproject.toml constraints.txt $(PLUGINS:%=%/pyproject.toml)

.PHONY: run test test-all test-nightly check format setup wheels clean
.DEFAULT_GOAL := test

run: $(RUN)
	$(BIN)/minillm train $(or $(ARGS),--preset $(RECIPE))

test: check
	$(PYTEST) -m "not slow and not full and not gpu and not metal"

test-all: test
	$(PYTEST) -m "slow or full or gpu or metal"

test-nightly: $(STAMP)
	$(PYTEST) -m nightly

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline --quiet --strict-collection .github
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)

wheels: $(BASE)
	$(PIP) --quiet twine
	$(BIN)/python -m tools.release build --to dist

$(BASE): constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"minillm needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables setuptools  # rouge-score has no wheel, and Python 3.11's own setuptools builds none
	@touch $@

$(RUN): $(BASE) $(PINS)
	$(EDIT) -e '.[$(RUN_FRAMEWORK),fast]' $(RUN_PLUGINS:%=-e %)
	@touch $@

# The rest comes into the environment that `make run` began; where there is none, all in one go.
$(STAMP): $(BASE) $(PINS)
	$(EDIT) -e '.[torch,mlx,dev]' $(PLUGINS:%=-e %)
	@touch $(RUN) $@

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
