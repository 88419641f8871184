# `make demo` and `make test` do everything on a fresh machine with Python 3.11.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test lint docs examples test-unit test-real test-ui test-full test-simulated setup clean

# The first interpreter that is new enough and can create environments.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && { command -v $$p; break; }; done)
VENV := $(CURDIR)/.venv
RUN := $(VENV)/bin/python
STAGES := $(RUN) -m tools.stages

# Without compiled files every engine's start compiles vLLM and torch anew: half a minute each.
unexport PYTHONDONTWRITEBYTECODE

# Kernels, engines and pip keep state in the home folder: lend them one if there is none.
ifneq ($(shell test -n "$$HOME" && test -d "$$HOME" && test -w "$$HOME" && echo yes),yes)
ifeq ($(PIP_CONFIG_FILE),)
export PIP_CONFIG_FILE := $(wildcard $(HOME)/.config/pip/pip.conf)
endif
export HOME := $(CURDIR)/.venv-home
$(shell mkdir -p $(HOME))
$(info the home folder cannot be written: using $(HOME))
endif

help:
	@echo 'make demo       set up, run a notebook, stamp it, run it again, check'
	@echo 'make test       set up, then every gate and test'
	@echo 'make lint       ruff, mypy --strict, import contracts, docstrings'
	@echo 'make docs       build the documentation site in build/docs/html'
	@echo 'make examples   run the example notebooks again and compare'
	@echo 'make test-unit  tests without an engine'
	@echo 'make test-real  tests with the real engine'
	@echo 'make test-ui    tests in JupyterLab and Notebook 7, in a browser'
	@echo 'make test-full  make test and the slow tests, older JupyterLabs included'
	@echo 'make test-simulated  make test under each simulated kind of processor'
	@echo 'make clean      remove the environment and every build product'

setup:
	@test -n '$(PYTHON)' || { echo 'setup: FAILED: no Python 3.11 to 3.13 with venv on PATH' \
		'(Debian, Ubuntu: apt install python3.11-venv)'; exit 1; }
	@'$(PYTHON)' -m tools.setup_env --profile cpu --venv '$(VENV)'

demo: setup
	@'$(RUN)' examples/run_demo.py

test: setup
	@$(STAGES) lint docs examples tests

lint: setup
	@$(STAGES) lint

docs: setup
	@$(STAGES) docs

examples: setup
	@$(STAGES) examples-full

test-unit: setup
	@$(STAGES) unit

test-real: setup
	@$(STAGES) real

test-ui: setup
	@$(STAGES) ui

test-full: setup
	@$(STAGES) lint docs examples-full full simulated

test-simulated: setup
	@$(STAGES) --as all

clean:
	rm -rf .venv .venv-home .venv-labs build dist .coverage .coverage.* htmlcov .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
