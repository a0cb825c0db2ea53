# make demo      set up, then the whole way on the demo checkpoint, into runs/demo
# make test      set up, then every check and the whole suite (what .ci/run calls)
# make test-elsewhere   what vLLM and lm-eval make of the output, in environments of their own (docs/elsewhere.md)
# make install   set up alone: .venv with everything but the extra `tensorrt`; leaves .venv/bin/fp8q
# make lint      the checks without the tests          make format   what the checks can mend themselves
# make fuzz      meet fp8q with what is wrong, for MINUTES (10), and kill it KILLS times (20); SEED=1
# make benchmarks   measure again what docs state, into benchmarks/results, and write the tables; PARTS='kv_cache memory'
# make clean     remove what was made, .venv included
#
# PYTHON=…    the interpreter that .venv is made from (3.11 or later)
# PIP_ARGS=…  for every pip install, such as --extra-index-url https://download.pytorch.org/whl/cpu
# PARTS=…     which benchmarks; those of time want a quiet machine
# ARGS=…      for pytest, such as ARGS='tests/quantize -x'
# WORKERS=…   test files at once (2); 0 for none but this process, as a debugger wants it

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-elsewhere fuzz install lint format benchmarks clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
STAMP := .venv/.installed
DEMO := examples/demo

help:
	@sed '/^$$/q; s/^# \{0,1\}//' Makefile

demo: install
	$(BIN)/fp8q run $(DEMO)/checkpoint --data $(DEMO)/calibration.txt --eval-data $(DEMO)/evaluation.txt --out runs/demo

# A file of tests is one worker's, whose runs are made once (tests/conftest.py).
WORKERS ?= 2
test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-elsewhere: install
	$(BIN)/python -m pytest tests/elsewhere -n $(WORKERS) --dist loadgroup $(ARGS)

MINUTES ?= 10
KILLS ?= 20
SEED ?= 1
fuzz: install
	$(BIN)/python tests/faults/campaign.py --minutes $(MINUTES) --kills $(KILLS) --seed $(SEED)

install: $(STAMP)

lint: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy -p fp8q
	$(BIN)/mypy tests examples benchmarks
	$(BIN)/lint-imports --no-logo

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What reads ../shared leaves its models out where they are not. A limit that is missed ends the part, not the others.
PARTS := kv_cache accumulator attention baselines engine_size two_terms fp16 probabilities forms choosing_scales \
  weight_mse weight_rounding rescale lint_time calibration memory export_memory export_time two_implementations \
  architectures unseen_architectures
benchmarks: install
	@missed=; for part in $(PARTS); do \
	  echo "== $$part"; $(BIN)/python benchmarks/$$part.py --save $$part >/dev/null || missed+=" $$part"; \
	done; $(BIN)/python benchmarks/tables.py --write; [[ -z $$missed ]] || { echo "missed or failed:$$missed"; exit 1; }

clean:
	rm -rf .venv build dist fp8q.egg-info runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The link lets type checkers see the package (pyproject, [tool.mypy]). The stamp comes last: an install that was
# interrupted is taken up again, a finished one is not repeated until what it was made from changes.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[all,dev]'
	mkdir -p .venv/typing
	ln -sfn ../.. .venv/typing/fp8q
	touch $@

# The first interpreter that can make a venv: those the pinned wheels exist for before any later one. (pip is the last
# thing that venv installs, so a venv that was interrupted is made again.)
CHECK := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))
$(BIN)/pip:
	@usable() { command -v "$$1" >/dev/null && "$$1" -c "$(CHECK)" "$$2" 2>/dev/null; }; \
	for try in $(or $(PYTHON:%=%:99),python3:13 python3.13:13 python3.12:13 python3.11:13 python3:99); do \
	  if usable "$${try%:*}" "$${try#*:}"; then \
	    echo "$${try%:*} -m venv .venv"; exec "$${try%:*}" -m venv --clear .venv; \
	  fi; \
	done; \
	echo "make: $(or $(PYTHON),python3): no Python 3.11 or later with venv and pip was found" \
	  "(python3 is $$(python3 --version 2>&1 | head -n 1)); install one (Debian, Ubuntu: apt install python3-venv)" \
	  "or name it with PYTHON=…" >&2; exit 2
