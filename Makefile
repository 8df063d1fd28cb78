# Needs only Python (3.10 to 3.13) and make. `make demo` runs the main job, `make test` the tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench docs figures setup clean

demo: $(STAMP)
	$(BIN)/gsanet paper structure
	$(BIN)/gsanet demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py --quick
	$(BIN)/python benchmarks/data_path.py

# Into the folder site; a broken link or reference is an error.
docs: $(STAMP)
	$(BIN)/python docs/build.py

figures: $(STAMP)
	for script in docs/draw_*.py; do $(BIN)/python $$script || exit 1; done

setup: $(STAMP)

# Made anew only when the dependencies change.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache build/parts site
