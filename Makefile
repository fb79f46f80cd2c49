# Every target first creates what it needs: a virtual environment with the versions pinned in deploy/install/cpu.lock,
# and small models under .cache/models. Both are created once. Requirements: Linux, Python 3.11 to 3.14, make, a C++
# compiler.
#   make PYTHON=/path/to/python3.12 demo     use this interpreter instead of the first supported one on PATH
#   make GPU=1 setup                         install for NVIDIA GPUs, from deploy/install/gpu.lock
#   make ARGS="-m 'not real'" test           pass arguments to pytest
#   make PROCESSES=4 test                    run tests in parallel (5 GiB of memory per process); 0 runs them one by one

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
GPU ?=
ARGS ?=
PROCESSES ?= 2

BIN := $(abspath $(VENV))/bin
LOCK := $(if $(GPU),gpu,cpu).lock
STAMP := $(VENV)/.installed-$(basename $(LOCK))
# The tests of a file stay in one process, because they share engines and clusters; tests/conftest.py orders the files.
SPREAD := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
# Extensions are compiled at first use with tools from the environment (ninja), so its bin folder must be on PATH.
RUN := PATH="$(BIN):$$PATH" PYTHONUNBUFFERED=1

.DEFAULT_GOAL := help
.PHONY: help setup lock update models demo cluster-demo test test-long test-faults mutants pairs lint docs release bench gpu-check clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): deploy/install/$(LOCK) deploy/install/install.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.14 found: install one, or pass its path: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) deploy/install/install.py --venv "$(VENV)" $(if $(GPU),--gpu)
	@touch $@

setup: $(STAMP) ## create the virtual environment with the pinned versions

lock: $(STAMP) ## write the locks again, with uv; ARGS="--upgrade-package NAME" moves a version
	$(RUN) "$(BIN)/python" deploy/install/lock.py $(ARGS)

update: models ## try the newest versions of ray, torch, vLLM, transformers, deepspeed and pyarrow in a copy, and say what moved (with uv)
	$(RUN) "$(BIN)/python" -m deploy.install.update $(ARGS)

models: $(STAMP) ## create the small models of the demo and the tests
	@$(RUN) "$(BIN)/troupe" demo --prepare --models .cache/models

demo: models ## train SmolLM2-135M with GRPO on this machine, results in runs/demo; a second call resumes there
	$(RUN) "$(BIN)/troupe" demo --models .cache/models

cluster-demo: models ## start four local Ray nodes, scale a run on them while it trains, and kill a node
	$(RUN) "$(BIN)/python" -m tests.real.cluster_demo

test: models ## run the test suite
	$(RUN) "$(BIN)/python" -m pytest $(SPREAD) $(ARGS)

test-long: models ## run the long tests: trainers in every form, all algorithms, resuming, worker deaths, a cluster, the wheel
	$(RUN) "$(BIN)/python" -m pytest -m long $(SPREAD) $(ARGS)

test-faults: models ## inject faults into runs on the real stack, and write their table in the docs
	$(RUN) "$(BIN)/python" -m pytest -m faults tests/faults $(ARGS)
	$(RUN) "$(BIN)/python" -m tests.faults.table

mutants: models ## plant one-line faults and run the tests that must find them, a quarter of an hour
	$(RUN) "$(BIN)/python" -m tests.mutants $(ARGS)

pairs: models ## run every pair of features of a run for two steps, on the real stack
	$(RUN) "$(BIN)/python" -m pytest -n 0 -m "pairs or real" tests/real/test_pairs.py $(ARGS)

# With Node's limit of 4 GiB pyright drops what it has inferred, and infers it again for every further file.
lint: $(STAMP) ## check style and types
	$(RUN) "$(BIN)/ruff" check .
	$(RUN) "$(BIN)/ruff" format --check .
	$(RUN) NODE_OPTIONS=--max-old-space-size=8192 "$(BIN)/pyright"

docs: $(STAMP) ## build the documentation into site/, with its generated pages brought up to date
	$(RUN) "$(BIN)/python" -m docs.tooling.write_reference
	$(RUN) NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict

release: $(STAMP) ## build wheel, sdist, bills of materials and checksums into dist/, and check them; TRIAL=1 without a section in the changelog
	$(RUN) "$(BIN)/python" -m deploy.install.release dist

bench: models ## run the benchmarks that are not recorded for this code, and write their table in the docs (hours); ARGS="--minutes 30" runs a piece
	$(RUN) "$(BIN)/python" -m benchmarks.suite $(ARGS)

# Where NVIDIA's driver is loaded, the environment is that of gpu.lock.
gpu-check: ## run the tests that need NVIDIA GPUs; ARGS=--lf runs those that failed, ARGS="-k sleep" some
	@$(MAKE) --no-print-directory models $(if $(wildcard /proc/driver/nvidia/version),GPU=1)
	$(RUN) "$(BIN)/python" -m pytest tests/gpu -m gpu --junitxml runs/gpu-check.xml $(ARGS)

clean: ## remove caches and build products, but keep the environment, the models and runs/
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## also remove the environment and the models
	rm -rf "$(VENV)" .cache
