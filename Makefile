# Everything a person or a CI machine runs. Needs make, git and a Python from 3.11 to 3.13.

# A Python to build .venv with, where the first one found is not the one wanted.
PYTHON ?=
# Test processes side by side.
JOBS ?= 2

BIN := .venv/bin
SOURCES := src tests

.NOTPARALLEL:
.PHONY: help setup demo test check format

help:
	@echo 'make demo     the plan of a small model and a short training run on 8 simulated devices'
	@echo 'make test     everything that CI checks'
	@echo 'make setup    prepare .venv with everything the tests need'
	@echo 'make check    lint, format and types (after make setup)'
	@echo 'make format   rewrite the sources the way make check wants them'
	@echo 'With PYTHON=python3.12 a new .venv is built with that Python.'

setup:
	@PYTHON='$(PYTHON)' sh scripts/setup.sh complete

demo:
	@PYTHON='$(PYTHON)' sh scripts/setup.sh demo
	@sh scripts/demo.sh

test: setup check
	$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

check:
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright

format:
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
