# Everything a developer types. The first target that needs it creates .venv, with the versions of constraints.txt.
#
#   PYTHON       the interpreter .venv is made from (3.11 or newer)
#   PIP_ARGS     more arguments for pip, for instance to choose another index
#   PYTEST_ARGS  arguments for pytest; one process a core, tests that share a run in one of them, where not given
#   MUTANTS      for `make mutants`: how many mutants are sampled
#   MUTANTS_ARGS for `make mutants`: more arguments, such as --again
#   LIBRARIES_ARGS  for `make test-libraries`: more arguments, such as --only qlora
#   GPU_PYTHON   for `make gpu`: an interpreter that has torch already; .venv is then neither made nor used
#   GPU_ARGS     for `make gpu`: more arguments, such as --only exact
#   TORCH        for `make test-torch`: the version of torch, such as 2.15.0
#   GPU_VERSION  for `make carry`: the Python version of the machine with the GPU

PYTHON ?= python3
PIP_ARGS ?=
TORCH ?=
PYTEST_ARGS ?= -n auto --dist loadgroup
MUTANTS ?= 200
MUTANTS_ARGS ?=
LIBRARIES_ARGS ?=
GPU_PYTHON ?=
GPU_ARGS ?=
GPU_VERSION ?= 3.12

# Tests start hundreds of processes, each of which would compile memprof anew.
unexport PYTHONDONTWRITEBYTECODE

# What depends on torch's version: the recorder, dry runs with the names below torch.cuda, plans as applied, the launcher.
OF_TORCH := tests/recorder tests/virtual tests/lab/test_zoo.py tests/policies/test_draft.py tests/policies/test_plan_apply.py tests/policies/test_evict.py \
    tests/policies/test_accumulate_gradients.py tests/policies/test_checkpoint_autograd.py tests/policies/test_optimizer.py \
    tests/policies/test_swap.py tests/launch/test_parent.py tests/launch/test_plan_record.py

# These run in processes of their own: the models they leave alive would be in the recordings of other tests.
APART := tests/policies/matrix tests/policies/test_averages.py tests/policies/test_copies.py

COMMA := ,
EXPORT := dashboard/memprof_dashboard/export_page
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPLETE := $(VENV)/.complete
# pip compiles what it installs on one core, this on all, but for what few or none import: packages' own tests, models,
# plots and lexers by the hundred, pip's own parts and mypy's, which are built. A file that cannot be compiled (a
# template, say) is not imported either.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile $(PIP_ARGS)
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing/_internal|transformers/models|graph_objs|lexers|pip|mypy|torch_geometric)/' $(VENV)/lib || true
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
# torch is installed first and alone: a machine that keeps a build of its own (for its GPU, or for none) takes that one,
# and what is installed next finds torch there. Half of what is to be compiled is torch's: that is done meanwhile.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memprof needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 (or newer)")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(PIP_INSTALL) $(PINNED_TORCH)
	($(COMPILE)) & $(PIP_INSTALL) -c constraints.txt -e '.[$(1)]'; status=$$?; wait; exit $$status
	$(COMPILE)
endef
TORCH_VENV := .venv-torch-$(TORCH)

# The matrix of libraries has an environment of its own. The index has torchvision for CUDA alone: where it is installed
# beside torch for the CPU, no model of transformers can be imported. timm, which needs it, lies with it in a folder of its own.
LIBRARIES := .venv-libraries
VISION := $(shell grep -E '^(timm|torchvision)==' constraints.txt)

# Notebooks, trackers and what checks a release: a hundred packages that nothing else needs. MLflow and Trackio require
# other versions of three packages than the rest.
EXTRAS := .venv-extras

# Gigabytes of NVIDIA's, which only dry runs with convolutions ask: beside the environment, not in it.
CUDNN := .venv-cudnn

.PHONY: help demo test test-all test-cudnn test-extras test-libraries test-torch mutants check bench docs pictures screenshots gpu carry man dist \
    release audit licences clean
.DEFAULT_GOAL := help

help: ## Show these targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Record a small GPT, show what fills its memory, make it fit in half of it, open the dashboard.
	$(BIN)/memprof record -f -o demo.memprof sample_traces/gpt/train.py
	$(BIN)/memprof report demo.memprof
	$(BIN)/memprof suggest demo.memprof --budget 50% -f --write demo-plan.toml
	$(BIN)/memprof record -f -o demo-fits.memprof --plan demo-plan.toml sample_traces/gpt/train.py
	@echo
	@echo "Now yours:  $(BIN)/memprof record -o mine.memprof path/to/train.py"
	@echo
	@if [ -t 1 ]; then $(BIN)/memprof dashboard demo.memprof demo-fits.memprof; \
	else echo "In a terminal, this ends in: $(BIN)/memprof dashboard demo.memprof demo-fits.memprof"; fi

test: $(COMPLETE) ## Run the tests, all but the slow ones.
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(APART)
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(addprefix --ignore=,$(APART))

test-all: $(COMPLETE) ## Run the tests, the slow ones too.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m '' $(APART)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m '' --cold tests/conformance
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m '' $(addprefix --ignore=,$(APART) tests/conformance)

test-cudnn: $(COMPLETE) ## Check workspaces of convolutions against cuDNN itself (no GPU needed).
	test -d $(CUDNN) || $(PIP_INSTALL) -c constraints.txt --target $(CUDNN) nvidia-cudnn-cu13
	MEMPROF_CUDNN=1 PYTHONPATH=$(CURDIR)/$(CUDNN) $(BIN)/python -m pytest -n 0 tests/virtual/test_cudnn.py

test-extras: $(EXTRAS)/.ready ## Run the tests of notebooks, experiment trackers and release files.
	$(EXTRAS)/bin/python -m pytest -n0 -m '' tests/integrations/test_trackers.py tests/integrations/test_notebook_file.py \
	    tests/docs/test_notebooks.py tests/test_release.py

test-libraries: $(LIBRARIES)/.ready ## Train small jobs of popular libraries every way, and write the tables of docs/libraries.md.
	MEMPROF_VISION=$(CURDIR)/$(LIBRARIES)/vision $(LIBRARIES)/bin/python lab/libraries/run.py $(LIBRARIES_ARGS)

test-torch: $(TORCH_VENV)/.ready ## Run what depends on torch with another version of it: make test-torch TORCH=2.15.0
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(OF_TORCH)

mutants: $(READY) ## Test the tests: sample changes of the source, and list those that no test detects in build/mutants.
	$(BIN)/python -m lab.mutants --sample $(MUTANTS) $(MUTANTS_ARGS)

check: $(COMPLETE) ## Run every check that reads the code: lint, format, types, import floors.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(READY) ## Measure the figures of docs/benchmarks.md on this machine.
	$(BIN)/python lab/benchmarks/run.py

docs: $(COMPLETE) ## Build the documentation into build/site; the commands in it are run.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: $(COMPLETE) ## Make the pictures of the README and the documentation from real recordings, with a Chromium.
	$(BIN)/python -m lab.pictures.make

plot-bundle: ## Build the part of plotly.js that HTML reports hold, with node and npm, from the pinned release.
	mkdir -p build/plot-bundle
	cp packaging/plot_bundle/* build/plot-bundle
	cd build/plot-bundle && npm install --ignore-scripts --no-audit --no-fund && npm run --silent build
	gzip -9 -n -c build/plot-bundle/plotly.js > $(EXPORT)/plotly.js.gz
	cp build/plot-bundle/licences.txt $(EXPORT)/plotly.LICENSE.txt

screenshots: $(COMPLETE) ## Take screenshots of every view of the dashboard, in both themes and three widths, into build/screenshots.
	$(BIN)/python -m lab.pictures.screenshots

gpu: $(if $(GPU_PYTHON),,$(READY)) ## Prove on a machine with one GPU what is promised there (docs/gpu.md), into build/gpu.
	$(or $(GPU_PYTHON),$(BIN)/python) -m lab.gpu --out build/gpu $(GPU_ARGS)

carry: $(READY) ## Gather in build/carried-VERSION what a machine with a GPU and without a network may lack.
	$(BIN)/python -m pip install $(PIP_ARGS) -q --upgrade --target build/carried-$(GPU_VERSION) --no-deps --only-binary=:all: \
	    --python-version $(GPU_VERSION) --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
	    hypothesis markdown-it-py mdurl pygments pytest-timeout rapidfuzz rich tomlkit

man: $(READY) ## Write the manual pages into build/man; the wheel makes its own.
	$(BIN)/python -m memprof.cli.manual build/man/man1

dist: $(READY) ## Build the wheel and the sdist into dist/, the same bytes from the same commit.
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation

release: $(EXTRAS)/.ready ## Build dist/ and check it; write the bill of materials into build/sbom. What the release workflow runs.
	rm -rf dist build/sbom
	$(MAKE) dist
	$(EXTRAS)/bin/python -m twine check --strict dist/*
	$(EXTRAS)/bin/check-wheel-contents dist/*.whl
	mkdir -p build/sbom
	rm -rf build/installed && $(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install $(PIP_ARGS) -q -c constraints.txt "$$(ls dist/*.whl)[dashboard]"
	$(EXTRAS)/bin/cyclonedx-py environment build/installed --output-reproducible --of JSON -o build/sbom/torch-memprof.cdx.json
	rm -rf build/installed

audit: $(EXTRAS)/.ready ## Check the pinned dependencies for known vulnerabilities, where an index answers.
	$(EXTRAS)/bin/python packaging/audit.py

licences: $(EXTRAS)/.ready ## List the licences of the dependencies that are installed here.
	$(EXTRAS)/bin/pip-licenses --from=mixed --order=license --format=markdown

clean: ## Remove .venv, caches and everything built.
	rm -rf $(VENV) $(LIBRARIES) $(EXTRAS) $(CUDNN) .venv-torch-* build dist demo*.memprof demo*.memprof.spool demo-plan.toml
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(call INSTALL,all$(COMMA)dev)
	@touch $@

$(LIBRARIES)/.ready: pyproject.toml constraints.txt
	@test -x $(LIBRARIES)/bin/pip || $(PYTHON) -m venv $(LIBRARIES) || { rm -rf $(LIBRARIES); exit 1; }
	$(LIBRARIES)/bin/python -m pip install $(PIP_ARGS) $(PINNED_TORCH)
	$(LIBRARIES)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[torch,integrations,libraries]'
	$(LIBRARIES)/bin/python -m pip install $(PIP_ARGS) --no-deps --upgrade --target $(LIBRARIES)/vision $(VISION)
	@touch $@

$(EXTRAS)/.ready: pyproject.toml constraints.txt
	@test -x $(EXTRAS)/bin/pip || $(PYTHON) -m venv $(EXTRAS) || { rm -rf $(EXTRAS); exit 1; }
	$(EXTRAS)/bin/python -m pip install $(PIP_ARGS) $(PINNED_TORCH)
	grep -vE '^(certifi|importlib_metadata|pillow)==' constraints.txt > $(EXTRAS)/constraints.txt
	$(EXTRAS)/bin/python -m pip install $(PIP_ARGS) -c $(EXTRAS)/constraints.txt -e '.[all,dev,extras,integrations]'
	@touch $@

# The build of torch that pip chooses, with CUDA where that is its default, and what those tests need.
.venv-torch-%/.ready: pyproject.toml constraints.txt
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D) || { rm -rf $(@D); exit 1; }
	$(@D)/bin/python -m pip install $(PIP_ARGS) torch==$*
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install $(PIP_ARGS) -c $(@D)/constraints.txt -e '.[torch]' accelerate hypothesis jsonschema \
	    pytest pytest-timeout pytest-xdist safetensors
	@touch $@

.venv-torch-/.ready:
	@echo "make test-torch needs a version of torch: make test-torch TORCH=2.15.0"; exit 2

# What the tests and the documentation need besides: the libraries that memprof goes with. All of it at once.
$(COMPLETE): pyproject.toml constraints.txt
	$(call INSTALL,all$(COMMA)dev$(COMMA)docs$(COMMA)integrations)
	@touch $(READY) $@
