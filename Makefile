# make demo    what meshplan does, on a real model and real text
# make test    everything: linters, types, layers, all tests
# PY picks the interpreter, VENV the environment:  make test PY=python3.12 VENV=.venv312

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

PY ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)

# libtpu admits one process at a time, and the others start processes of their own: these run one by one.
SERIAL_TESTS := $(wildcard tests/tpu tests/gpu tests/multiprocess)

.PHONY: help demo test test-cpu lint tests-parallel tests-serial bench clean

help:
	@sed -n '1,3s/^# //p' Makefile

demo: $(VENV)/.installed-demo
	$(BIN)/python -m demo

test: lint tests-parallel tests-serial

# What needs neither of the ahead-of-time compilers: for a second interpreter.
test-cpu: $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) --dist worksteal tests/pure tests/cpu8

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

tests-parallel: $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) --dist worksteal tests $(SERIAL_TESTS:%=--ignore=%)

tests-serial: $(VENV)/.installed-test
	$(PYTEST) $(SERIAL_TESTS)

bench: $(VENV)/.installed-test
	$(PYTEST) tests/benchmarks -o python_files='bench_*.py' -o python_functions='bench_* test_*' --benchmark-enable -s

clean:
	rm -rf .venv* .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"meshplan needs Python 3.11 or newer; $(PY) is {sys.version.split()[0]}. Name another: make PY=python3.12")'
	@echo "creating $(VENV) with $$($(PY) --version)"
	@$(PY) -m venv $(VENV) || { rm -f $@; exit 1; }

# Stamps are written only after a whole install: a broken one is tried again, a good one is not repeated.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	@echo "installing meshplan[models,report] into $(VENV)"
	@$(PIP_INSTALL) -e '.[models,report]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "installing meshplan[test] into $(VENV) (the TPU and GPU compilers with it: 2.1 GB on disk)"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.installed-demo
