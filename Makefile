# `make run` and `make test` are all that a newcomer needs; both set up .venv first, once.
# PYTHON=python3.12 picks the interpreter for a new .venv. With uv on the PATH it is used, else venv and pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := orchestrator envs tests benchmarks
# The types of examples are not checked: what they import is not in .venv.
LINTED := $(PACKAGES) examples .ci
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
.PHONY: help setup run test test-integration test-adapters test-browser test-slow test-network crash soak ray simulated test-vllm example coverage release-check adapters check format bench bench-compare bench-readme bench-plots bench-hour docs lock clean

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

test-network: $(READY) ## cut every link between hosts for 5, 30 and 120 s (as root); NETWORK_S="5" for short ones only
	NETWORK_S="$(or $(NETWORK_S),5 30 120)" $(PYTEST) -s tests/integration/test_network.py

soak: $(READY) ## run the service for an hour and see that it does not grow; SOAK_S=600 for ten minutes
	SOAK_S=$(or $(SOAK_S),3600) $(PYTEST) -m slow tests/integration/test_soak.py

simulated: $(READY) ## run configurations for real and hold what `simulate` says against them; a quarter of an hour
	SIMULATED=1 $(PYTEST) -m slow tests/integration/test_simulated.py --timeout 900 -rP

ray: $(READY) adapters ## kill the nodes of a Ray cluster for six minutes, one every 60 s, and prove that nothing was lost
	RAY_KILLS=$(or $(RAY_KILLS),6) RAY_KILL_EVERY_S=60 $(PYTEST) -s -m adapters tests/adapters/test_ray.py -k nodes_die

test-vllm: $(READY) ## run the tests against a real vLLM, which is installed first (3.4 GB)
	$(PYTEST) -m vllm tests/vllm

example: $(READY) ## run examples/grpo_torch: a tiny model on a real vLLM learns while an engine and a rank of its trainer are killed
	$(PYTEST) -m vllm tests/vllm/test_example.py --capture no

coverage: $(READY) ## run the quick and the integration tests and show how much of each room they reach, child processes included
	@rm -rf build/coverage && mkdir -p build/coverage
	$(MAKE) test TEST_OPTIONS="--cov --cov-report= --timeout 240"
	$(MAKE) test-integration TEST_OPTIONS="--cov --cov-append --cov-report= --timeout 240"
	@$(BIN)/python .ci/coverage_by_room.py

release-check: ## all that must hold before a release; takes hours, and its log stays in build/
	@PYTHON=$(PYTHON) .ci/release-check

check: $(READY) ## lint, formatting, types, and which room imports which
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy --strict $(PACKAGES)
	$(BIN)/lint-imports

format: $(READY) ## format the code, and fix what the linter can
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

bench: $(READY) ## print one table of every figure; ONLY=name for one benchmark, BENCH_PEERS=1 installs peers and measures them too
	$(BIN)/python -m benchmarks $(ONLY) $(if $(JSON),--json $(JSON))

bench-compare: $(READY) ## measure BASE=REV and the working tree in turns, and say which figures moved; ONLY=name, ROUNDS=4
	$(BIN)/python -m benchmarks $(ONLY) --compare "$(BASE)" $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(JSON),--json $(JSON))

bench-readme: $(READY) ## write the README's table from JSON=FILE, which make bench BENCH_PEERS=1 JSON=FILE has written
	$(BIN)/python -m benchmarks --readme "$(JSON)"

bench-hour: $(READY) ## an hour at 5,000 rollouts a second: do memory, file descriptors and lag stay flat? MINUTES=60, RATE=5000
	$(BIN)/python -m benchmarks.endurance $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RATE),--rate $(RATE))

bench-plots: $(READY) ## measure what a rollout costs as a run grows, and draw it into docs/scaling.md; less than half an hour
	$(BIN)/python -m benchmarks.curves

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
