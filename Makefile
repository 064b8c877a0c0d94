# Every target does its own set-up: Python 3.10 or newer and make are all it needs.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench bench-recovery chaos clean

PYTHON ?= python3
BIN := .venv/bin
# pip says a lot; what is being fetched is enough to see that it goes on.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
SHOW := sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^Installing collected.*/  installing/p; s/^Successfully installed.*/  done/p'

help:
	@echo "make demo   train a small network with python and with oars run -n 2, and compare"
	@echo "make test   ruff, mypy and the whole test suite"
	@echo "make bench  the table of docs/performance.md (ARGS=--quick for a short one)"
	@echo "make bench-recovery  kill ranks, ours and torchrun's, and take the time until training goes on"
	@echo "make chaos  200 trainings in which ranks die (ARGS=\"--runs 20\" for fewer)"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove what the others made"

demo: .venv/run
	@$(BIN)/python examples/demo.py -n 2

test: lint
	@$(BIN)/python -m pytest $(ARGS)

lint: .venv/dev
	@$(BIN)/ruff check
	@$(BIN)/mypy

bench: .venv/run
	@$(BIN)/python bench/table.py $(ARGS)

bench-recovery: .venv/run
	@$(BIN)/python bench/recovery.py $(ARGS)

chaos: .venv/run
	@$(BIN)/python tests/chaos/chaos.py $(ARGS)

clean:
	rm -rf .venv oars-runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps: an environment is made anew only when what it is made from has changed.
.venv/bin/python:
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

.venv/run: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what a run needs (torch is large: about a minute)"
	@$(PIP) -e '.[torch]' | $(SHOW)
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the tests need (torch is large: about a minute)"
	@$(PIP) -e '.[torch,keras,tensorflow,jax,dev]' | $(SHOW)
	@touch $@ .venv/run
