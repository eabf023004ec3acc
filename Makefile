# PYTHON is the interpreter of an environment that holds the `test` extra.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

RUFF := $(PYTHON) -m ruff
MYPY := $(PYTHON) -m mypy
PYTEST := $(PYTHON) -m pytest
LINT_IMPORTS := $(PYTHON) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo

.DEFAULT_GOAL := check
.PHONY: check lint fast test nightly gpu docs format

check: lint fast  ## what every change must pass: under a minute, offline

lint:  ## the part of `check` that runs no test
	$(RUFF) format --check .
	$(RUFF) check .
	$(MYPY)
	$(LINT_IMPORTS)

fast:
	$(PYTEST) -m "not slow and not nightly" -n 2

test:  ## everything but the nightly tests
	$(PYTEST) -m "not nightly" -n 2

nightly:
	$(PYTEST) -m nightly -n 2

gpu:
	@echo "gpu tests: none exist yet; not run"

docs:  ## rewrite the generated pages (docs/semantics.md)
	$(PYTHON) docs/generate.py

format:
	$(RUFF) format .
	$(RUFF) check --fix .
