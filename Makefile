# colibri-lab: `make help` lists what can be made. Everything lands in .venv, build-*/ and workbench/, which git ignores.

PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# Processes that share the tests: the C tests one by one, the Python tests file by file.
WORKERS ?= 2

# An editable install: edits of Python are seen at once, and a change of what is listed here installs (and compiles) again.
BUILD_INPUTS := pyproject.toml LICENSE $(shell find csrc cpp_bindings -type f 2>/dev/null)
FILE_LIST    := $(VENV)/files.txt

CMAKE := $(or $(shell command -v cmake 2>/dev/null),$(abspath $(BIN))/cmake)
CTEST := $(or $(shell command -v ctest 2>/dev/null),$(abspath $(BIN))/ctest)
JOBS  ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

# $(call extra,NAME): this package, up to date, and what its extra NAME asks for
extra = $(VENV)/stamps/package $(VENV)/stamps/$(1)

.PHONY: help lab test test-c test-python test-browser test-torch test-emulated wheel engine lint bench soak clean FORCE
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

lab: $(call extra,lab) ## open JupyterLab on a copy of the notebooks in workbench/ (ARGS="--no-browser" and the like go to jupyter lab)
	@$(BIN)/colibri-lab lab workbench -- $(ARGS)

test: test-c test-python ## everything that needs neither torch nor a browser (ARGS go to pytest)

test-c: $(CMAKE) ## the C tests, through ctest
	$(CMAKE) -S csrc -B build-c -DCMAKE_BUILD_TYPE=Release
	$(CMAKE) --build build-c --parallel $(JOBS)
	$(CTEST) --test-dir build-c --output-on-failure --parallel $(WORKERS)

test-python: $(call extra,test)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/browser --ignore=tests/torch \
		-m "not torch and not browser and not emulated and not soak" $(ARGS)

test-browser: $(call extra,test) $(call extra,browser) ## real JupyterLab in a real Chromium (which must be installed)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/torch -m browser tests/browser $(ARGS)

test-torch: $(call extra,test) $(call extra,hf) $(VENV)/stamps/older-transformers ## against transformers, old and new (installs PyTorch)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/browser -m torch $(ARGS)

test-emulated: $(CMAKE) $(call extra,test) ## the same bytes on other CPUs, played by QEMU (qemu-user and an aarch64 compiler must be installed)
	$(BIN)/python -m pytest --ignore=tests/browser --ignore=tests/torch -m emulated $(ARGS)

engine: ## libcolibri.a, libcolibri.so and colibri_cli in build-engine/: no Python, no CMake
	$(MAKE) -C csrc -j $(JOBS)

lint: $(call extra,test) $(call extra,dev) ## ruff, mypy, compiler warnings as errors
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) -C csrc -j $(JOBS) check

bench: $(call extra,test) ## measure this machine: engine, peers and limits (ARGS=--quick takes three minutes, ARGS=--help)
	$(BIN)/python benchmarks/bench.py $(ARGS)

soak: $(CMAKE) $(call extra,test) ## half an hour: fuzzing (clang), leaks, load, rounding of every float; log in benchmarks/soak/
	sh tools/soak.sh $(BIN)/python $(ARGS)

clean: ## remove everything that was built here; workbench/ stays
	rm -rf $(VENV) build build-* dist .pytest_cache .mypy_cache .ruff_cache

# ---- how the environment comes to be -------------------------------------------------------------------------------------------

$(BIN)/python:
	@PYTHON="$(PYTHON)" sh tools/make_venv.sh $(VENV)

# The list of package files changes only when a file comes or goes: editable installs map each module when they are made.
$(FILE_LIST): FORCE | $(BIN)/python
	@find colibri_lab notebooks -name __pycache__ -prune -o -type f ! -name '*.pyc' ! -name '*.so' -print | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(VENV)/stamps/package: $(BUILD_INPUTS) $(FILE_LIST) | $(BIN)/python
	@echo "colibri-lab: compiling the engine and installing what it needs (a minute or two)"
	@$(BIN)/python -m pip install --quiet --editable .
	@mkdir -p $(@D) && touch $@

$(VENV)/stamps/%: pyproject.toml | $(VENV)/stamps/package
	@echo "colibri-lab: installing what \"$*\" asks for in pyproject.toml"
	@$(BIN)/python tools/install_extra.py $*
	@touch $@

$(VENV)/stamps/older-transformers: tools/older_transformers.py | $(VENV)/stamps/hf
	@$(BIN)/python tools/older_transformers.py
	@touch $@

$(abspath $(BIN))/cmake: | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'cmake>=3.20'
