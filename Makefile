# Two commands do everything, set-up included:  make train   make test
# They need Python 3.11 or newer and pip, nothing else.
#
#   make train       train a language model four ways on local processes, compare them   (arguments: ARGS="--steps 800")
#   make test        all tests            (arguments: ARGS="tests/fsdp -k resume")
#   make test-deep   all tests, with many more random cases
#   make test-versions   placement and runtime tests on another torch, in an environment of its own   (TORCH=2.14.1)
#   make bench       step time, traffic and memory against DDP and FSDP2
#   make notebooks   run the notebooks and store what they print and draw
#   make lint        ruff, and mypy --strict on the three packages
#
# A set-up step runs again only when pyproject.toml or constraints.txt changes. PYTHON=python3.12 picks another Python
# for a new .venv. On a machine without CUDA, PyTorch's CPU wheels are much smaller than the default ones on Linux: its
# installation page names their index, which goes into PIP_EXTRA_INDEX_URL.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# pytest processes of a run of all tests. Each has ranks of its own, which rarely keep more than one core busy.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test test-deep test-versions bench notebooks lint setup
.DEFAULT_GOAL := test
# pip must not run twice at once in one environment.
.NOTPARALLEL:

train: $(VENV)/.installed-train
	$(BIN)/python examples/compare.py $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(or $(ARGS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)

test-deep: $(VENV)/.installed-dev
	HYPOTHESIS_PROFILE=deep RAGGED_TEST_DEADLINE=$${RAGGED_TEST_DEADLINE:-120} $(BIN)/python -m pytest --timeout 7200 $(ARGS)

# The newest torch that fits is a CUDA build of several GB on Linux; where it cannot be had, the target says so and stops.
TORCH ?= 2.14.1
OTHER := .venv-torch-$(TORCH)
VERSION_TESTS := tests/ragged_shard/test_placement.py tests/ragged_shard/test_redistribute.py tests/ragged_shard/test_ops.py \
  tests/ragged_shard/test_checkpoint.py tests/ragged_shard/test_install.py tests/parity/test_against_ddp.py

test-versions: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest $(VERSION_TESTS) $(ARGS)

$(OTHER)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt 'torch==$(TORCH)' -e '.[dev]' \
	  || { echo "skipped: torch $(TORCH) cannot be installed here"; exit 1; }
	@touch $@

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/step.py $(ARGS)

notebooks: $(VENV)/.installed-dev
	PYTHONPATH=$(CURDIR) $(BIN)/jupyter execute --NotebookClient.record_timing=False --inplace notebooks/*.ipynb

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.installed-dev

# .installed-train, .installed-dev: written when the packages of that extra are in the environment. An environment that is
# already there is added to, never rebuilt. pip would compile one file after the other, and all models of transformers;
# a file of torch for a newer Python does not compile.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@$(BIN)/python -m compileall -qq -j 0 -x 'transformers/models|/tests?/' $(VENV)/lib ragged_shard fsdp ragged_optim examples benchmarks || true
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + \
	  sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
