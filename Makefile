# SPDX-License-Identifier: Apache-2.0
VENV ?= .venv
BIN := $(VENV)/bin
# The pytest command, not "python -m pytest": that would put the source tree before the installed package.
# What --cov measures is in pyproject.toml.
PYTEST := VERL_PLATFORM=cpu $(BIN)/pytest --cov

.PHONY: venv quickstart test test-fast lint format clean

venv: ## the stack and this project in .venv
	VENV=$(VENV) scripts/setup_venv.sh

quickstart: venv ## two real training steps on the CPU
	PYTHON=$(abspath $(BIN)/python) examples/cpu_quickstart/run.sh

test: venv ## all tests that run without a GPU
	$(PYTEST) --durations=12 -m "not gpu"

test-fast: venv ## without the tests that start verl, Ray or SGLang
	$(PYTEST) -m "not gpu and not slow"

lint: venv ## style, formatting, layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: venv ## apply style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## everything made by the targets above
	rm -rf .venv .quickstart build *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
