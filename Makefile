# Two commands are enough on a fresh machine: `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= python3
OTHER_PYTHONS ?= 3.12 3.13
UV ?= uv

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
GEN_PYTHON := .venv-gen/bin/python

CHECKED := gym_ckpt_grpc tests tools benchmarks
# What runs under the other Pythons too: all that starts no server processes and waits for no real lease, without
# the long random runs and the replays of every crash.
UNIT := tests --ignore=tests/coordinator --ignore=tests/e2e --ignore=tests/interop --ignore=tests/cli --ignore=tests/random --ignore=tests/fuzz \
	--ignore=tests/testing --ignore=tests/faults --ignore=tests/storage/test_power_loss.py \
	--ignore=tests/storage/test_crash_calls.py --ignore=tests/storage/test_crash_failures.py -m "not e2e and not soak"
RELEASED := protos/released.binpb

.PHONY: help setup demo test test-python test-hf setup-nemo-gym test-nemo-gym test-observability check mutants style types rooms sizes behaviour gen gen-check lint breaking \
	bench soak fuzz-reader lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{ printf "  %-12s %s\n", $$1, $$2 }'

# ---- environments: stamps say what is done; `make clean` starts anew ------------------------------------------

# $(call new-venv,DIRECTORY,PYTHON)
define new-venv
	@$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, and $(2) is $$($(2) --version 2>&1)." >&2; \
		echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	rm -rf $(1)
	$(2) -m venv $(1)
	@touch $(1)/.made
endef

# $(call install,DIRECTORY,LOCK)
define install
	$(1)/bin/python -m pip install --quiet --require-hashes --requirement $(2)
	@touch $(1)/.installed
endef

# $(call install-package,DIRECTORY): the checkout itself, editable
define install-package
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(1)/.ready
endef

setup: $(VENV)/.ready ## Make the environment that everything else uses

$(VENV)/.made:
	$(call new-venv,$(VENV),$(PYTHON))
$(VENV)/.installed: $(VENV)/.made requirements/dev.txt
	$(call install,$(VENV),requirements/dev.txt)
$(VENV)/.ready: $(VENV)/.installed pyproject.toml
	$(call install-package,$(VENV))

.venv-gen/.made:
	$(call new-venv,.venv-gen,$(PYTHON))
.venv-gen/.installed: .venv-gen/.made requirements/gen.txt
	$(call install,.venv-gen,requirements/gen.txt)

# The lower end of the runtime ranges; tests/unit/test_stubs.py loads the generated code in it.
.venv-oldest/.made:
	$(call new-venv,.venv-oldest,$(PYTHON))
.venv-oldest/.installed: .venv-oldest/.made requirements/oldest.txt
	$(call install,.venv-oldest,requirements/oldest.txt)

# The other Pythons, such as .venv-3.12.
.venv-3.%/.made:
	$(call new-venv,$(@D),$(shell tools/find-python 3.$*))
.venv-3.%/.installed: .venv-3.%/.made requirements/dev.txt
	$(call install,$(@D),requirements/dev.txt)
.venv-3.%/.ready: .venv-3.%/.installed pyproject.toml
	$(call install-package,$(@D))

.PRECIOUS: .venv-3.%/.made .venv-3.%/.installed

# ---- run -----------------------------------------------------------------------------------------------------

demo: setup ## Checkpoint, kill, restore and finish a small Gym of real servers
	$(BIN)/gym-ckpt demo

# ---- test ----------------------------------------------------------------------------------------------------

test: setup .venv-oldest/.installed ## Run the tests (ARGS="..." goes to pytest)
	$(BIN)/python -m pytest $(ARGS)

test-python: setup .venv-oldest/.installed ## Run the unit tests under the other Pythons found here
	@for version in $(OTHER_PYTHONS); do \
		if [ -z "$$(tools/find-python $$version)" ]; then echo "Python $$version: not found, left out"; continue; fi; \
		echo "Python $$version:"; \
		$(MAKE) --no-print-directory .venv-$$version/.ready; \
		.venv-$$version/bin/python -m pytest -q -o cache_dir=.venv-$$version/.pytest_cache $(UNIT) $(ARGS); \
	done

# torch comes from where pip finds it; TORCH="--index-url <where the CPU wheels are> torch" saves some gigabytes.
TORCH ?= torch
.venv-hf/.made:
	$(call new-venv,.venv-hf,$(PYTHON))
.venv-hf/.installed: .venv-hf/.made requirements/dev.txt
	$(call install,.venv-hf,requirements/dev.txt)
.venv-hf/.ready: .venv-hf/.installed pyproject.toml
	.venv-hf/bin/python -m pip install --quiet $(TORCH)
	.venv-hf/bin/python -m pip install --quiet transformers
	$(call install-package,.venv-hf)

test-hf: .venv-hf/.ready ## A cut generation of a small real transformer equals the uncut one (some gigabytes; never in CI)
	.venv-hf/bin/python -m pytest tests/hf $(ARGS)

# NeMo Gym asks for a patch release of Python 3.13 that many machines have not yet; its servers run on each of them.
.venv-nemo-gym/.made:
	$(call new-venv,.venv-nemo-gym,$(or $(shell tools/find-python 3.13),python3.13))
.venv-nemo-gym/.installed: .venv-nemo-gym/.made requirements/nemo-gym.txt
	.venv-nemo-gym/bin/python -m pip install --quiet --ignore-requires-python --requirement requirements/nemo-gym.txt
	@touch $@
.venv-nemo-gym/.ready: .venv-nemo-gym/.installed pyproject.toml
	.venv-nemo-gym/bin/python -m pip install --quiet --ignore-requires-python --editable '.[asgi,cli]'
	.venv-nemo-gym/bin/python -m pip check
	@touch $@

setup-nemo-gym: .venv-nemo-gym/.ready ## Make the environment with the released NeMo Gym (Python 3.13, 1.5 GB)

test-nemo-gym: .venv-nemo-gym/.ready ## Run the tests with the released NeMo Gym's own servers
	.venv-nemo-gym/bin/python -m pytest tests/nemo_gym $(ARGS)

test-observability: setup ## Alert rules and dashboard against a Gym of real servers and a real Prometheus
	@for tool in prometheus promtool; do \
		command -v $$tool >/dev/null || { \
			echo "$$tool is not installed: apt-get install prometheus, or put Prometheus' own release on PATH" >&2; \
			exit 1; }; \
	done
	$(BIN)/python -m pytest tests/observability $(ARGS)

# atheris has wheels for a few platforms only, so that no lock names it.
.venv-atheris/.made:
	$(call new-venv,.venv-atheris,$(PYTHON))
.venv-atheris/.installed: .venv-atheris/.made requirements/run.txt
	$(call install,.venv-atheris,requirements/run.txt)
.venv-atheris/.ready: .venv-atheris/.installed
	.venv-atheris/bin/python -m pip install --quiet atheris
	@touch $@

MINUTES ?= 30
fuzz-reader: .venv-atheris/.ready ## atheris on the reader of stored files, MINUTES=30; finds: .venv-atheris/found-*
	@mkdir -p .venv-atheris/corpus
	PYTHONPATH=.:gen/python .venv-atheris/bin/python -m tests.fuzz.atheris_reader \
		-max_total_time=$$(($(MINUTES) * 60)) -print_final_stats=1 -verbosity=0 .venv-atheris/corpus

ROUNDS ?= 20
soak: setup .venv-oldest/.installed mutants ## Run the long proofs: tests marked soak, each scenario 20 times, every seeded fault
	$(BIN)/python -m pytest -m soak $(ARGS)
	@$(MAKE) --no-print-directory fuzz-reader
	@for round in $$(seq $(ROUNDS)); do \
		echo "scenarios, round $$round of $(ROUNDS)"; \
		GYM_CKPT_TEST_SCALE=$$((24 + 8 * round)) $(BIN)/python -m pytest -q -x -k scenarios tests/e2e; \
	done

mutants: setup ## Put each seeded fault of tests/mutants.toml into a copy; its tests must find it (ARGS="words")
	$(BIN)/python tools/mutants.py $(ARGS)

bench: setup ## Measure commits, restores, the pause and telemetry (ARGS="--gate --json FILE"; half an hour, 30 GB of disk)
	$(BIN)/python -m benchmarks $(ARGS)

# ---- check ---------------------------------------------------------------------------------------------------

check: style types rooms lint gen-check sizes ## Everything that needs no test run; what CI runs first
	@$(BIN)/python tools/behaviour.py --check
	@$(BIN)/python tools/mutants.py --list
	@$(BIN)/python tools/errors_page.py --check
	@$(BIN)/python tools/telemetry_page.py --check

style: setup ## ruff: rules and format
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: setup ## mypy --strict
	$(BIN)/mypy $(CHECKED)

rooms: setup ## import-linter: who may import whom
	$(BIN)/lint-imports

sizes: setup ## Lengths of files and functions
	@$(BIN)/python tools/sizes.py $(CHECKED)

behaviour: setup ## The behaviours that no test names yet, by milestone
	@$(BIN)/python tools/behaviour.py

# ---- the contract --------------------------------------------------------------------------------------------

gen: .venv-gen/.installed ## Generate gen/python from protos
	$(GEN_PYTHON) tools/generate.py

gen-check: .venv-gen/.installed ## Is gen/python what the protos say?
	@$(GEN_PYTHON) tools/generate.py --check

lint: setup ## buf: lint and format of the protos
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

breaking: setup ## buf: is the contract compatible with the released one?
	@if [ -f $(RELEASED) ]; then $(BIN)/buf breaking --against $(RELEASED); \
	else echo "nothing is released yet: $(RELEASED) is made at the first release"; fi

# ---- upkeep --------------------------------------------------------------------------------------------------

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header

lock: ## Renew the pinned requirements (needs uv; UPGRADE=--upgrade for newer versions)
	$(COMPILE) $(UPGRADE) pyproject.toml --extra cli --extra minigym --extra asgi --extra telemetry \
		requirements/dev.in --output-file requirements/dev.txt
	$(COMPILE) $(UPGRADE) pyproject.toml --extra cli --extra minigym --constraint requirements/dev.txt \
		--output-file requirements/run.txt
	$(COMPILE) $(UPGRADE) requirements/gen.in --output-file requirements/gen.txt
	$(COMPILE) $(UPGRADE) --resolution lowest-direct pyproject.toml requirements/oldest.in \
		--output-file requirements/oldest.txt

clean: ## Remove environments, caches and built files
	rm -rf .venv .venv-* .bench-* dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find gym_ckpt_grpc gen tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
