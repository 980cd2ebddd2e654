# Everything sets itself up: needs Python >= 3.10 (PYTHON=...), make, and a package index.
#   make demo   measures and tunes the two included examples, CPU or GPU
#   make test   lint, types, import contracts, tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes of the tests and the demo run side by side: one thread each.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint unit docs install clean help

help:
	@sed -n '2,4p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@echo "== Setting up $(VENV): torch (CPU build, some 900 MB on disk) and flopwise; a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]' \
		|| { echo "== The installation failed; see above. Nothing else was changed."; exit 1; }
	@$(BIN)/python tools/guard_cpu_build.py
	@touch $(STAMP)

install: $(STAMP)

test: $(STAMP) lint unit

lint: $(STAMP)
	@echo "== Lint, types, import contracts"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

unit: $(STAMP)
	@echo "== Tests"
	@$(BIN)/python -m pytest

demo: $(STAMP)
	@$(BIN)/python tools/demo.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
