# Everything a person or a CI machine runs. Needs make, git and a Python from 3.11 to 3.13.

# A Python to build .venv with, where the first one found is not the one wanted.
PYTHON ?=
# Test processes at a time: one more than the two cores, because some wait for the ranks that they started.
JOBS ?= 3

BIN := .venv/bin
SOURCES := src tests benchmarks

.NOTPARALLEL:
.PHONY: help setup demo test test-all fuzz mutants test-targets quick check lint format golden bench

help:
	@echo 'make demo     the plan of a small model and a short training run on 8 simulated devices'
	@echo 'make test     everything that CI checks'
	@echo 'make test-all the same, every layout compared with one device, and docs/sameness.md written again: about two and a half hours'
	@echo 'make fuzz     7,000 damaged and invented inputs for every command. Part of make test-all'
	@echo 'make mutants  300 small faults, drawn and put into the code: is each seen by a test? Part of make test-all'
	@echo 'make test-targets  the steps of real models, compiled for TPUs and GPUs without them (0.5 GB of compilers)'
	@echo 'make setup    prepare .venv with everything the tests need'
	@echo 'make quick    the tests again, with what JAX compiled for the last time'
	@echo 'make check    lint, format and types (after make setup)'
	@echo 'make format   rewrite the sources the way make check wants them'
	@echo 'make golden   write the golden files anew: read the diff before you commit it'
	@echo 'make bench    the step against one written by hand, and the other times; BENCH=--quick is shorter'
	@echo 'With PYTHON=python3.12 a new .venv is built with that Python.'

setup:
	@PYTHON='$(PYTHON)' sh scripts/setup.sh complete

demo:
	@PYTHON='$(PYTHON)' sh scripts/setup.sh demo
	@sh scripts/demo.sh

# The tests of one file share compilations, so that they stay in one process.
PYTEST := $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=2

# Test processes and the commands that they start share bytecode and, of this run only, what JAX compiles. The type checker, which
# keeps one core busy for a minute, runs beside them; what it says comes last.
test: setup lint
	rm -rf .pytest_cache/jax-of-one-run
	mkdir -p .pytest_cache
	@$(BIN)/pyright >.pytest_cache/types 2>&1 & types=$$!; \
	PYTHONDONTWRITEBYTECODE= JAX_COMPILATION_CACHE_DIR='$(CURDIR)/.pytest_cache/jax-of-one-run' \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 $(PYTEST) --durations=10 --durations-min=5; tests=$$?; \
	wait $$types; types=$$?; echo pyright; cat .pytest_cache/types; [ $$tests = 0 ] && [ $$types = 0 ]

test-all: test
	$(PYTEST) -m matrix
	$(BIN)/python -m tests.sameness.whole --jobs=$(JOBS)
	$(BIN)/python -m tests.sameness.stages
	$(BIN)/python -m tests.sameness.orders
	$(BIN)/python -m tests.sameness.recipes
	$(BIN)/python -m tests.sameness.curves
	$(BIN)/python -m tests.cli.compared --count=100
	$(BIN)/python -m tests.engine_torch.whole
	$(BIN)/python -m tests.engine_torch.whole_stages
	$(BIN)/python -m tests.engine_torch.whole_modules
	$(BIN)/python -m tests.engine_torch.resting_modules
	$(BIN)/python -m tests.pairs.whole
	$(BIN)/python -m tests.runs.kills --jobs=$(JOBS)
	$(BIN)/python -m tests.checkpoint.flipping
	$(BIN)/python -m tests.sameness.random_policies
	$(BIN)/python -m tests.sameness.random_whole --jobs=$(JOBS)
	$(BIN)/python -m tests.sameness.random_whole --jobs=$(JOBS) --dtype=bfloat16
	$(MAKE) fuzz
	$(BIN)/python -m tests.cli.drawn --count=200
	$(BIN)/python -m tests.mutants --jobs=$(JOBS) --seed=$(SEED)

# Other cases each day: the seed is printed, and each fault with the command that shows it again.
fuzz: setup
	$(BIN)/python -m tests.fuzz --cases=7000 --jobs=$(JOBS)

# Goes on where it was stopped; SEED=1 draws others.
SEED ?= 0
mutants: setup
	$(BIN)/python -m tests.mutants --jobs=$(JOBS) --seed=$(SEED)

test-targets:
	@PYTHON='$(PYTHON)' sh scripts/setup.sh targets
	$(BIN)/python -m pytest -m targets tests/targets

# Never what CI runs: a compilation that now fails could be answered from the cache.
quick:
	JAX_COMPILATION_CACHE_DIR='$(CURDIR)/.pytest_cache/jax' JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 $(PYTEST)

check: lint
	$(BIN)/pyright

lint:
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format:
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

golden:
	$(BIN)/python -m tests.golden.regenerate
	$(BIN)/python -m tests.golden.regenerate_findings
	$(BIN)/python -m tests.interop.regenerate
	$(BIN)/python -m tests.interop.maxtext_page

# Results, with the machine named, are kept in benchmarks/results.
bench: setup
	$(BIN)/python -m benchmarks $(BENCH)
