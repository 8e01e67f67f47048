# Everything runs in .venv, made on first use from nothing but a python3 of 3.10 or newer.
# No GPU, no compiler, no model hub.

PYTHON ?= python3
PROMPT ?= The old house stood at the edge of the moor, and
FAST := "not slow and not gpu and not network and not weights and not browser and not cluster and not clients and not attack"
BOOKKEEPING := $(addprefix tests/,cache predict tools/simulator)
BENCHMARKS := benchmarks/machinery.py benchmarks/policies/cost.py

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Else every process of the tests compiles all of them anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo gate test test-long test-all test-gpu-code test-newest test-oldest test-rounding test-cluster test-clients test-transformers test-compiled check same-bits docs bench audit dist lock format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## generate text with the bundled model, a quarter of its experts in memory
	$(BIN)/moe-infinity run models/demo -p "$(PROMPT)" --max-new-tokens 64 --temperature 0.8 --top-p 0.9 --seed 0 --host-memory 25% --report

gate: check test test-long ## what has to pass before a change is taken, and what CI runs
	$(MAKE) test-rounding ROUNDINGS="OTHER_ROUNDING=2"

test: export HF_HUB_OFFLINE = 1
test: $(INSTALLED) ## fast tests that take less than half a second each
	$(BIN)/python -m pytest -n 2 -m "not long and not gpu_code and "$(FAST)

test-long: export HF_HUB_OFFLINE = 1
test-long: $(INSTALLED) ## fast tests that take longer
	$(BIN)/python -m pytest -n 2 -m "long and not gpu_code and "$(FAST)

test-gpu-code: export HF_HUB_OFFLINE = 1
test-gpu-code: $(INSTALLED) ## fast tests of what a GPU would run, without one
	$(BIN)/python -m pytest -n 2 -m "gpu_code and "$(FAST)

# The tools of the tests keep their pins; a warning of a coming removal is an error here, too.
test-newest: export HF_HUB_OFFLINE = 1
test-newest: ## fast tests with the newest versions that pyproject.toml allows, but torch, in .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(PYTHON) scripts/admitted.py newest > .venv-newest/constraints.txt
	.venv-newest/bin/pip install torch==2.13.0 'setuptools>=77' wheel
	.venv-newest/bin/pip install -U -c .venv-newest/constraints.txt --no-build-isolation -e '.[dev]' torch==2.13.0
	.venv-newest/bin/python -m pytest -n 2 -m "not gpu_code and "$(FAST)

test-oldest: export HF_HUB_OFFLINE = 1
test-oldest: ## fast tests with the oldest versions that pyproject.toml allows, in .venv-oldest
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) scripts/admitted.py oldest > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install -c .venv-oldest/constraints.txt torch 'setuptools>=77' wheel
	.venv-oldest/bin/pip install -c .venv-oldest/constraints.txt --no-build-isolation -e '.[dev]'
	.venv-oldest/bin/python -m pytest -n 2 -m "not gpu_code and "$(FAST)

# Coverage is for the parts without torch, by their own tests: it would slow down the others.
test-all: $(INSTALLED) ## every test that needs no GPU, and the coverage gate of the parts without torch
	$(BIN)/python -m pytest -m "not gpu and not clients and not attack" $(BOOKKEEPING) --cov --cov-report=
	$(BIN)/python -m coverage report --fail-under=100
	$(BIN)/python -m pytest -n 2 -m "not gpu and not cluster and not clients and not attack" tests $(BOOKKEEPING:%=--ignore=%)

# Each has other last bits than the machine it runs on; those by number are in tests/other_machine.py.
ROUNDINGS ?= ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 OTHER_ROUNDING=1 OTHER_ROUNDING=2

test-rounding: export HF_HUB_OFFLINE = 1
test-rounding: $(INSTALLED) ## tests of arithmetic as machines run them that round differently
	@set -e; for rounding in $(ROUNDINGS); do echo "== $$rounding"; \
		env $$rounding $(BIN)/python -m pytest -n 2 -m "arithmetic and "$(FAST); done

test-cluster: $(INSTALLED) ## what needs Ray, which it installs into .venv
	$(PIP) install -e '.[cluster]' -c constraints.txt
	$(BIN)/python -m pytest -m cluster

# Not in parallel: one client after another has the machine for its prompt.
test-clients: $(INSTALLED) ## agents and libraries of others against a server, in .clients
	$(BIN)/python -m pytest -m clients tests/clients $(if $(CLIENT),-k $(CLIENT))

# One kind after another, each beside a client whose answers are checked. The machine should be quiet.
attack: $(INSTALLED) ## an hour of hostile requests against a server with 2 GiB of memory
	$(BIN)/python -m pytest -m attack tests/attack $(if $(KIND),-k $(KIND))

# transformers' repository at the tag of the installed version.
TRANSFORMERS_SOURCE ?= .transformers
RELEASE = v$(shell $(BIN)/python -c "from importlib.metadata import version; print(version('transformers'))")

test-transformers: $(INSTALLED) ## transformers' own tests through the backend, of all models or of MODELS="olmoe mixtral"
	$(PIP) install -c constraints.txt datasets parameterized pillow requests
	test -d $(TRANSFORMERS_SOURCE) || git clone --depth 1 --branch $(RELEASE) https://github.com/huggingface/transformers $(TRANSFORMERS_SOURCE)
	$(BIN)/python -m scripts.transformers_suite $(TRANSFORMERS_SOURCE) $(MODELS)

test-compiled: export TRITON_INTERPRET = 0
test-compiled: export CAPABILITY ?= 80
test-compiled: $(INSTALLED) ## kernels of a GPU as they are compiled for one, run without one
	$(BIN)/python -m pytest -n 2 -m "triton and not slow"

check: $(INSTALLED) ## format, lint, types, layout: changes nothing
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python scripts/check_layout.py
	$(BIN)/python scripts/rings.py

same-bits: export HF_HUB_OFFLINE = 1
same-bits: $(INSTALLED) ## one line that a refactor does not change: hashes of logits, tokens and counters
	$(BIN)/python -m scripts.same_bits $(if $(DETAILS),--details $(DETAILS))

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED) ## the documentation site in build/site; a broken link is an error
	$(PIP) install -e '.[docs]' -c constraints.txt
	$(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED) ## benchmarks that need no argument
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python "$$file"; done

audit: $(INSTALLED) ## known faults of the pinned versions, and licences of what is installed
	$(PIP) install --no-build-isolation -e '.[audit]' -c constraints.txt
	$(BIN)/python scripts/audit.py

# In an environment of its own: nothing but what the hashes of requirements/release.txt allow. The
# bill of materials names what requirements/runtime.txt has, and torch.
dist: ## what is published, in dist/, and a look at it and at the Dockerfile
	rm -rf dist .venv-release
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --require-hashes --no-deps -r requirements/release.txt
	.venv-release/bin/python scripts/build_dist.py dist
	grep ^torch== constraints.txt | cat requirements/runtime.txt - | .venv-release/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible -o dist/moe-infinity.cdx.json -
	.venv-release/bin/twine check --strict dist/*.whl dist/*.tar.gz
	.venv-release/bin/hadolint Dockerfile

# After a change of constraints.txt or of what the package requires, in some minutes. With a Python
# of 3.11: it leaves out nothing that a newer one needs. torch is chosen by who installs it.
LOCK = CUSTOM_COMPILE_COMMAND="make lock" .venv-lock/bin/pip-compile --quiet --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --constraint constraints.txt

lock: ## pins with hashes, in requirements/
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet pip-tools==7.6.2
	$(LOCK) --allow-unsafe -o requirements/release.txt requirements/release.in
	$(LOCK) --unsafe-package torch --extra serve -o requirements/runtime.txt pyproject.toml

format: $(INSTALLED) ## rewrite the code in the house format
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean: ## remove caches and build output; .venv and runs/ stay
	rm -rf build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

# torch goes first so that its build is chosen once and nothing after it moves it. It brings setuptools,
# pinned, so the package itself builds without an isolated (and unpinned) build environment.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("need Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	@echo "installing into .venv: some minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt torch==2.13.0 setuptools wheel
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
