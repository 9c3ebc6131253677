# Everything runs from .venv, which is made on first use and again when a requirement changes.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The first interpreter that runs and is new enough for constraints.txt.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

# Tools run as `python -m`, so that a checkout may lie at any path: scripts cannot carry a long one.
RUN := $(BIN)/python -m

# Whatever `make test` should hand to pytest, for example ARGS='-k smoothing -x'.
ARGS ?=

.PHONY: help quickstart test contract rl users versions lint format install clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  train a small model on 2 processes, then compare heads (runs/)"
	@echo "make test        lint, type-check and run all tests that this machine can run"
	@echo "make contract    the contract in docs/megatron.md, on six releases of megatron-core"
	@echo "make rl          the tests of docs/rl_libraries.md, with TRL and verl installed"
	@echo "make versions    the tests on each supported torch and Triton; downloads 25 GB"
	@echo "make users       the tests with transformers, torchtitan, TRL and verl, installed anew"
	@echo "make lint        ruff, ruff format --check and mypy only"
	@echo "make format      let ruff rewrite what it can"
	@echo "make install     make $(VENV) with everything in it"
	@echo "make clean       remove caches and build products; keeps $(VENV) and runs/"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make needs Python 3.11 or newer, found none" >&2; exit 1; }
	@$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) pip install --quiet --constraint constraints.txt \
		$$(grep '^torch==' constraints.txt) --editable '.[train,test,bench]'
	@touch $@

quickstart: $(INSTALLED)
	$(RUN) flce_dist.launch.train --config configs/quickstart.yaml

test: lint
	$(RUN) tests $(ARGS)

# ARGS=0.19 runs one release and keeps the results of the others.
contract: $(INSTALLED)
	$(RUN) tests.contract $(ARGS)

rl: $(INSTALLED)
	$(RUN) tests.versions rl

# ARGS=2.9 runs one release of torch.
versions: $(INSTALLED)
	$(RUN) tests.versions $(ARGS)

users: $(INSTALLED)
	$(RUN) tests.versions users

lint: $(INSTALLED)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(INSTALLED)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
