# SPDX-License-Identifier: Apache-2.0
VENV ?= .venv
BIN := $(VENV)/bin
# The pytest command, not "python -m pytest": that would put the source tree before the installed package.
PYTEST := VERL_PLATFORM=cpu $(BIN)/pytest
# Two at a time; the groups are tests/conftest.py's.
TWO := -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: venv quickstart test test-all test-faults test-fast families releases lint format clean

venv: ## the stack and this project in .venv
	VENV=$(VENV) scripts/setup_venv.sh

quickstart: venv ## two real training steps on the CPU
	PYTHON=$(abspath $(BIN)/python) examples/cpu_quickstart/run.sh

test: venv ## every feature once, without a GPU, two tests at a time; 20 minutes on two cores
	$(PYTEST) $(TWO) --durations=12 -m "not gpu and not extended and not faults"

test-all: venv ## also other SGLang releases, more layouts and more models; an hour on two cores
	$(PYTEST) --durations=12 -m "not gpu and not faults"

test-faults: venv ## every kind of fault in every place, at every stage of a sync
	$(PYTEST) --durations=5 -m faults

test-fast: venv ## without the tests that start verl, Ray or SGLang
	$(PYTEST) -m "not gpu and not slow and not extended and not faults"

families: venv ## syncs every model family and writes the tables of docs/families.md and docs/fp8.md again
	FAMILIES=write $(PYTEST) tests/contract/test_families.py tests/contract/test_fp8.py

releases: venv ## trains with every SGLang release and writes the table in docs/releases.md again
	RELEASES=write $(PYTEST) tests/e2e/test_old_and_new_sglang.py

lint: venv ## style, formatting, layers, types, size, licence lines, names of test modules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python .ci/budget.py
	VERL_PLATFORM=cpu $(BIN)/python -m benchmarks.report --check  # one commit in the README's table
	VERL_PLATFORM=cpu $(BIN)/python .ci/figures.py  # every figure's file
	@without=$$(grep -rL --include='*.py' --include='*.sh' --include='*.yaml' SPDX-License-Identifier \
		verl_sync_plugin cpu_stack configs tests benchmarks examples scripts setup.py); test -z "$$without" || \
		{ echo "files without an SPDX line:" $$without; exit 1; }
	@twice=$$(find tests -name 'test_*.py' | sed 's|.*/||' | sort | uniq -d); test -z "$$twice" || \
		{ echo "pytest collects no two test modules of one name, since tests/ has no packages. Rename one:" $$twice; exit 1; }

format: venv ## apply style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## everything made by the targets above
	rm -rf .venv .quickstart build *.egg-info cpu_stack/build cpu_stack/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
