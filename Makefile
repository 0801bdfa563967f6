# Two OpenMP pools (torch's and the optimizer kernel's) would spin against each other on a small machine.
export OMP_WAIT_POLICY ?= passive

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test check demo soak bench h200-table clean

install: $(VENV)/installed

# torch first and alone, from the constraints file: its CPU build, where an index has one. On a machine with a GPU:
# make install CONSTRAINTS=
CONSTRAINTS ?= -c constraints.txt
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	touch $@

test: check
	$(BIN)/python -m pytest -m "not slow and not cuda"

check: install
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# A small model, from nothing to a comparison of prediction and measurement, in build/demo.
demo: install
	rm -rf build/demo
	$(BIN)/megatrain demo --out build/demo

# The long forms of the property tests (1,000 plans for bitwise equality, 200 schedules for mutations), and all of the short ones on
# other examples than those of `make test`.
soak: install
	$(BIN)/python -m pytest --hypothesis-profile=random -m slow
	$(BIN)/python -m pytest --hypothesis-profile=random -m "not slow and not cuda"

bench: install
	$(BIN)/python -m sim.bench

# The speed table of the rows that were measured on one H200; refused where the code has changed since.
h200-table: install
	$(BIN)/python -m papers.h200.table

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
