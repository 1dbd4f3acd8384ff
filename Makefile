# make demo | make test | make faults | make lint. PYTHON picks the interpreter, VENV the environment's folder.

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.deadpool-installed

FITS := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.12 python3.11 python3.10; do \
	if $$p -c '$(FITS)' 2>/dev/null; then echo $$p; break; fi; done)
endif

.PHONY: demo test faults lint install clean

demo: $(STAMP)
	$(BIN)/python tools/demo.py --output-dir demo-out

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

faults: $(STAMP)
	$(BIN)/python -m pytest -m faults $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt
	@if ! $(or $(PYTHON),false) -c '$(FITS)' 2>/dev/null; then \
		echo "Python 3.10, 3.11 or 3.12 is needed; name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[demo,test]'
	touch $@

clean:
	rm -rf $(VENV) demo-out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
