# flopwise. Each target sets itself up first: it needs make, Python 3.10 or newer, and a package index.
#   make demo             measures and tunes the two example scripts: 3 to 5 minutes after the set-up
#   make demo TORCH=any   the same with this machine's own torch: for a GPU
#   make test             lint, types, import contracts, tests
#   make conformance TRACES=FOLDER   real traces of several ranks against their known answers
#   make docs             builds the documentation into build/site; a broken link is an error
#   make clean            removes what the above made
# Another Python: make test PYTHON=python3.12

PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && { echo $$p; exit; }; \
	done; echo python3)
# cpu: the pinned CPU build, as development and CI use it. any: the torch that PYTHON has, else what pip chooses.
TORCH ?= cpu
VENV := $(if $(filter any,$(TORCH)),.venv-any,.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests that time nothing run two at a time; the others one after another.
SIDE_BY_SIDE := $(addprefix tests/,trace diagnosis flops records reports hardware trials summary cli patching \
	kit/graph kit/precision kit/memory fixes tuning conformance docs benchmarks examples)

.PHONY: help install test lint unit conformance docs demo clean

help:
	@sed -n '2,8s/^# *//p' Makefile

$(STAMP): pyproject.toml constraints.txt tools/set_up.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "== flopwise needs Python 3.10 or newer; $(PYTHON): $$($(PYTHON) -V 2>&1 || true)"; \
		echo "== Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) tools/set_up.py --venv $(VENV) --torch $(TORCH)

install: $(STAMP)

test: lint unit

lint: $(STAMP)
	@echo "== Lint, types, import contracts"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# Tests start processes that run side by side: one thread each.
unit: $(STAMP)
	@echo "== Tests"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 2 --dist loadfile $(SIDE_BY_SIDE)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(SIDE_BY_SIDE:%=--ignore=%)

conformance: $(STAMP)
	@if [ -d "$(TRACES)" ]; then \
		FLOPWISE_TRACES="$(TRACES)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/conformance; \
	else \
		echo "== Skipped: TRACES=$(TRACES) is no folder. make conformance TRACES=FOLDER with nano8, h200_ddp2, hta_pair, nsys in it"; \
	fi

docs: $(STAMP)
	@$(BIN)/python -m mkdocs build --strict
	@echo "== build/site/index.html"

demo: $(STAMP)
	@$(BIN)/python tools/demo.py

clean:
	rm -rf .venv .venv-any build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .demo
