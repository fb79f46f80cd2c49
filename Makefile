# Every target does its own set-up: a virtual environment with the versions pinned in deploy/cpu.lock, and the two
# small models under .cache/models. Both are made once. Needed: Linux, Python 3.11 to 3.14, make, a C++ compiler.
#   make PYTHON=/path/to/python3.12 demo     another interpreter than the first one that is new enough
#   make ARGS="-m 'not real'" test           arguments for pytest
#   make PROCESSES=4 test                    tests side by side, where there are cores and memory (5 GiB each); 0: one by one

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
ARGS ?=
PROCESSES ?= 2

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
# Extensions are compiled at first use, and the tools for that (ninja) are in the environment.
# A file stays in one process, because its tests share engines and clusters; tests/conftest.py says which files begin.
SPREAD := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
RUN := PATH="$(BIN):$$PATH" PYTHONUNBUFFERED=1

.DEFAULT_GOAL := help
.PHONY: help setup models demo cluster-demo test test-long lint bench bench-quick clean distclean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): deploy/cpu.lock deploy/install.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.14 found: install one, or name it: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) deploy/install.py --venv "$(VENV)"
	@touch $@

setup: $(STAMP) ## make the virtual environment with the pinned versions

models: $(STAMP) ## make the two small models of the demo and the tests
	@$(RUN) "$(BIN)/python" deploy/demo_models.py

demo: models ## train SmolLM2-135M with GRPO on this machine, results in runs/demo; once more goes on there
	$(RUN) "$(BIN)/troupe" run deploy/laptop-grpo.yaml --out runs/demo $(if $(wildcard runs/demo/checkpoints/step-*),--resume)

cluster-demo: models ## start four Ray nodes here, scale a run on them while it trains, and kill a node
	$(RUN) "$(BIN)/python" deploy/cluster_demo.py

test: models ## run the test suite
	$(RUN) "$(BIN)/python" -m pytest $(SPREAD) $(ARGS)

test-long: models ## run the tests that start the real stack again and again: resumption, deaths, chains, a cluster
	$(RUN) "$(BIN)/python" -m pytest -m long $(SPREAD) $(ARGS)

lint: $(STAMP) ## check style and types
	$(RUN) "$(BIN)/ruff" check .
	$(RUN) "$(BIN)/ruff" format --check .
	$(RUN) "$(BIN)/pyright"

bench: models ## run every benchmark and write the table of docs/benchmarks.md (hours); ARGS="--only data_plane" for some
	$(RUN) "$(BIN)/python" -m benchmarks.suite $(ARGS)

bench-quick: models ## small benchmarks: has any ratio got worse on this kind of machine?
	$(RUN) "$(BIN)/python" -m benchmarks.quick $(ARGS)

clean: ## remove caches and build products; the environment, the models and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment and the models as well
	rm -rf "$(VENV)" .cache
