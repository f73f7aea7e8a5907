# make serve [PORT=8000]   install what is needed and serve the shipped model
# make test                install what is needed and run the tests (make test-slow: the long ones too)
# make test-clients        the same with lm-evaluation-harness and guidellm, and run their tests
# make lint                ruff and mypy
PORT ?= 8000
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test test-slow test-clients lint clean

serve: $(VENV)/.installed
	$(BIN)/python -m jdllm.serve --port $(PORT)

# Two processes, each with whole files, since fixtures compile programs for a file.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not clients"

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not clients"

test-clients: $(VENV)/.installed-clients
	$(BIN)/python -m pytest -m clients

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --editable .
	touch $@

# PyTorch is the tests' second opinion on weights and tokens. It goes first, so that nothing else picks its build.
$(VENV)/.installed-test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --editable ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-clients: $(VENV)/.installed-test
	$(BIN)/python -m pip install --editable ".[clients]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .jax_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
