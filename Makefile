# SPDX-License-Identifier: Apache-2.0
#
# make demo    cold, warm, restarted and corrupted on the real engine, with a table
# make test    all checks, then every test with branch coverage
# make lint    the checks alone        make unit / make e2e   a part of the tests
#              tests run in two processes side by side; JOBS=n changes that
# make soak SECONDS=60       simulated runs over random seeds, for as long as you like
# make docs    the documentation as a site that opens offline, in build/site
# make mutations             breaks ucm in small ways; tests must notice each of them
# make clean   remove what the targets above made
#
# Each target first brings .venv up to date; that takes a second or less when
# constraints/ and pyproject.toml did not change. Where `torch==2.13.0` on the
# configured package index is a CUDA build, name PyTorch's own CPU index:
#   make test INSTALL_ARGS="--extra-index-url <PyTorch's CPU index>"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
INSTALL_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2
# Tests start hundreds of interpreters; each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
SECONDS ?= 60
SOAK_ARGS ?=
MUTATIONS_ARGS ?=
BIN := $(VENV)/bin
# Whole stretches of neighbours go to one process, so that they share an engine's files.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The stamps carry the hash of their inputs: a changed pin rebuilds the environment,
# a changed pyproject.toml only installs the package anew.
hash = $(shell cat $(1) | sha256sum | cut -c1-16)
DEPS := $(VENV)/.deps-$(call hash,constraints/*.txt scripts/setup)
READY := $(VENV)/.ready-$(call hash,constraints/*.txt scripts/setup pyproject.toml ucm/native*.c)

.PHONY: help setup demo docs test lint unit e2e soak mutations clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(DEPS):
	@INSTALL_ARGS='$(INSTALL_ARGS)' scripts/setup '$(VENV)'
	@touch $@

$(READY): $(DEPS)
	@echo '[setup] installing ucm in place'
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --no-index --editable .
	@rm -f $(VENV)/.ready-*
	@touch $@

setup: $(READY)

demo: setup
	@$(BIN)/python -m examples.demo $(DEMO_ARGS)

lint: setup
	@echo '[lint] whitespace'
	@git diff --check "$$(git hash-object -t tree /dev/null)"
	@echo '[lint] ruff check'
	@$(BIN)/ruff check .
	@echo '[lint] ruff format'
	@$(BIN)/ruff format --check .
	@echo '[lint] mypy'
	@$(BIN)/mypy
	@echo '[lint] import-linter'
	@$(BIN)/lint-imports
	@echo '[lint] codespell'
	@git ls-files -z | xargs -0 $(BIN)/codespell
	@echo '[lint] validate-pyproject'
	@$(BIN)/validate-pyproject pyproject.toml

# pytest comes last and alone: its closing line is the last line of the output.
test: lint
	@$(PYTEST) --cov=ucm --cov-branch --cov-report=term $(PYTEST_ARGS)

unit: setup
	@$(PYTEST) -m 'not engine' $(PYTEST_ARGS)

e2e: setup
	@$(PYTEST) -m engine $(PYTEST_ARGS)

soak: setup
	@$(BIN)/python -m tests.simulation.soak --seconds $(SECONDS) $(SOAK_ARGS)

# --strict: a link or a page that leads nowhere ends it.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo 'build/site/index.html'

mutations: setup
	@$(BIN)/python -m tests.mutations.run $(MUTATIONS_ARGS)

clean:
	rm -rf $(VENV) .cache .demo build *.egg-info .coverage* .hypothesis
	rm -f ucm/_native*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
