# `make run` and `make test` are all that a newcomer needs; both set up .venv first, once.
# PYTHON=python3.12 picks the interpreter for a new .venv. With uv on the PATH it is used, else venv and pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := orchestrator envs tests benchmarks
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
HAVE_PYTHON = $(PYTHON) $(NEW_ENOUGH) 2>/dev/null || { echo "Python 3.11 or newer is needed, and $(PYTHON) is \
$$($(PYTHON) --version 2>/dev/null || echo not there); name another one: PYTHON=python3.12" >&2; exit 1; }

# Tests that start processes wait much, so one worker more than there are cores. WORKERS=0 runs them one by one.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
PYTEST := $(BIN)/python -m pytest
PARALLEL := --numprocesses $(WORKERS) --dist worksteal
# Without compiled modules every process that a test starts compiles the packages again, which takes most of its time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test test-integration test-adapters test-browser test-slow crash soak test-vllm coverage release-check adapters check format bench docs lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv and install everything into it

run: $(READY) ## run the whole loop on this machine, from the start (configs/quickstart.toml)
	$(BIN)/orchestrator run configs/quickstart.toml --fresh

test: $(READY) ## run the quick tests, side by side; they need no library but those in .venv
	$(PYTEST) $(PARALLEL) -m "not integration and not slow and not adapters and not vllm and not browser" $(TEST_OPTIONS)

test-integration: $(READY) ## run the tests that start whole services, stop them and kill them
	$(PYTEST) $(PARALLEL) -m "integration and not slow and not adapters and not vllm and not browser" $(TEST_OPTIONS)

test-adapters: $(READY) adapters ## run the tests of environments of other libraries (installs 4 GB, once)
	$(PYTEST) -m "adapters and not vllm" --timeout 600 tests/adapters

test-browser: $(READY) ## run the tests of the page in a real browser; they need Debian's chromium
	$(PYTEST) -m browser tests/browser --timeout 240

test-slow: $(READY) ## run the tests that take longer than a few seconds each
	$(PYTEST) $(PARALLEL) -m "slow and not adapters and not vllm and not browser" --timeout 600

crash: $(READY) ## kill the orchestrator hundreds of times and prove that nothing was lost or repeated
	CRASH_SEEDS=$(or $(CRASH_SEEDS),10) $(PYTEST) -m slow tests/integration/test_crash.py --timeout 3600

soak: $(READY) ## run the service for an hour and see that it does not grow; SOAK_S=600 for ten minutes
	SOAK_S=$(or $(SOAK_S),3600) $(PYTEST) -m slow tests/integration/test_soak.py

test-vllm: $(READY) ## run the tests against a real vLLM, which is installed first (3.4 GB)
	$(PYTEST) -m vllm tests/vllm

coverage: $(READY) ## run the quick and the integration tests and show how much of each room they reach, child processes included
	@rm -rf build/coverage && mkdir -p build/coverage
	$(MAKE) test TEST_OPTIONS="--cov --cov-report= --timeout 240"
	$(MAKE) test-integration TEST_OPTIONS="--cov --cov-append --cov-report= --timeout 240"
	@$(BIN)/python .ci/coverage_by_room.py

release-check: ## all that must hold before a release; takes hours, and its log stays in build/
	@PYTHON=$(PYTHON) .ci/release-check

check: $(READY) ## lint, formatting, types, and which room imports which
	$(BIN)/ruff check $(PACKAGES) .ci
	$(BIN)/ruff format --check $(PACKAGES) .ci
	$(BIN)/mypy --strict $(PACKAGES)
	$(BIN)/lint-imports

format: $(READY) ## format the code, and fix what the linter can
	$(BIN)/ruff check --fix $(PACKAGES) .ci
	$(BIN)/ruff format $(PACKAGES) .ci

bench: $(READY) adapters ## print every figure; ONLY=name for one benchmark
	$(BIN)/python -m benchmarks $(ONLY)

adapters: $(READY) # virtualenvs with the libraries that environments are adapted from; quick when they are there
	@PYTHON=$(BIN)/python tests/adapters/setup_venvs || echo "tests of what could not be installed will be skipped"

docs: $(READY) ## write docs/configuration.md, docs/metrics.md and configs/schema.json from what the code says
	$(BIN)/python -m orchestrator.config.reference docs/configuration.md
	$(BIN)/python -m orchestrator.views.metrics_reference docs/metrics.md
	$(BIN)/orchestrator schema > configs/schema.json

lock: ## write constraints.txt anew, from the newest versions that pyproject.toml allows
	@$(HAVE_PYTHON)
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	{ sed -n '/^#/p' constraints.txt; build/lock/bin/python -m pip freeze --exclude-editable; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove .venv, caches and build products; runs/ stays
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(PACKAGES) -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is the last thing written: an interrupted set-up is taken up again. An interpreter that is gone or too old
# (the checkout moved, the system was upgraded) makes .venv anew.
$(READY): pyproject.toml constraints.txt
	@$(BIN)/python $(NEW_ENOUGH) 2>/dev/null || rm -rf $(VENV)
	@[ -e $(VENV) ] || { $(HAVE_PYTHON); }
	@[ -e $(VENV) ] || if command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) $(VENV); else $(PYTHON) -m venv $(VENV); fi
	@if command -v uv >/dev/null; then \
	  echo "installing with uv" && uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; \
	else \
	  echo "installing with pip" && $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'; \
	fi
	@touch $@
