# Each target installs what it needs by itself, into .venv (the core) or .venv-vllm (with vLLM's CPU build, about 4 GB).
# Needed beforehand: Python 3.11 or newer, make.

PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
# The virtual environments must not see a user's or another environment's packages.
unexport PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Progress on a terminal, quiet in a pipe.
PIP_INSTALL := -m pip install $(shell [ -t 2 ] || echo --quiet)

.PHONY: help demo test test-crash test-orders servers lint docs stubs bench demo-vllm test-vllm clean

help:
	@echo "make demo       the main job without engines: a daemon, a prefill and a decode process, bytes verified"
	@echo "make test       ruff, mypy and all tests that need no engine"
	@echo "make test-orders ten thousand random orders of events in the vLLM plugin's books"
	@echo "make test-crash hundreds of SIGKILLs under load, bytes checked after each restart"
	@echo "make demo-vllm  the main job with two real vLLM engines"
	@echo "make test-vllm  the tests with real engines"
	@echo "make bench      the benchmarks"
	@echo "make lint       ruff and mypy"
	@echo "make docs       writes the generated parts of docs/ anew"
	@echo "make stubs      writes kvstore/wire/v1 anew from proto/kvstore/v1"
	@echo "make clean      removes the virtual environments and caches"

demo: $(VENV)/core.stamp
	$(VENV)/bin/python -m bench.demo

test: lint servers
	$(VENV)/bin/python -m pytest -m "not vllm and not crash and not orders" --ignore=tests/vllm --ignore=tests/transformers

# Real servers for the tests. Where they are not there and cannot be installed, what needs them is skipped, and says so.
servers:
	@if ! { command -v redis-server && command -v fio && command -v openssl && command -v docker-compose \
	        && command -v ip && command -v tc && command -v prometheus; } >/dev/null; then \
	    packages="redis-server fio openssl docker-compose iproute2 prometheus"; \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq \
	        && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages; \
	    else echo "something of this is missing: apt-get install $$packages" >&2; fi; fi

# Hundreds of kills; about 10 minutes.
test-crash: $(VENV)/test.stamp
	$(VENV)/bin/python -m pytest -m crash --timeout 1800 tests/disk tests/crash tests/redis

# Ten thousand random orders of what can happen between an engine and its daemon; about 10 minutes.
test-orders: $(VENV)/test.stamp
	$(VENV)/bin/python -m pytest -m orders --timeout 600 tests/plugin

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/test.stamp
	$(VENV)/bin/python docs/generate.py

# The include path gives the files the name of the package they are generated into.
stubs: $(VENV)/test.stamp
	$(VENV)/bin/python -m grpc_tools.protoc -Ikvstore/wire/v1=proto/kvstore/v1 \
	    --python_out=. --pyi_out=. --grpc_python_out=. kvstore/wire/v1/engine.proto kvstore/wire/v1/admin.proto

bench: $(VENV)/test.stamp
	$(VENV)/bin/python -m bench

demo-vllm: $(VLLM_VENV)/vllm.stamp
	$(VLLM_VENV)/bin/python -m bench.demo_vllm

test-vllm: $(VLLM_VENV)/vllm.stamp
	$(VLLM_VENV)/bin/python -m pytest tests/vllm tests/transformers

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks

%/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	    || { echo "Python's venv module is needed: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $*
	touch $@

$(VENV)/core.stamp: $(VENV)/venv.stamp pyproject.toml
	$(VENV)/bin/python $(PIP_INSTALL) --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/core.stamp
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[test,bench]'
	touch $@

# torch is named beside the package: left to the resolver alone, pip may take a newer build with CUDA for a moment, and
# gigabytes with it. torchvision, torchaudio and torchcodec come along as dependencies of vLLM; nothing here uses them, and
# builds of theirs for another torch fail when transformers imports them, and vLLM with it.
$(VLLM_VENV)/vllm.stamp: $(VLLM_VENV)/venv.stamp pyproject.toml
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) 'torch==2.13.0+cpu' --editable '.[vllm,nixl,test,bench]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Stamps of virtual environments are no intermediate files to be deleted.
.PRECIOUS: %/venv.stamp
