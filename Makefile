# `make demo` and `make test` do all their own set-up in .venv; nothing but Python, pip, make and a compiler is needed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread a process: several ranks share the cores.
export OMP_NUM_THREADS := 1

.PHONY: help setup demo test check format bench-comm clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(VENV)/.installed ## Make .venv with the tested versions (demo and test do this by themselves).

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; a few minutes where torch must be downloaded) …"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup ## Train a small GPT on Python's own sources, on two CPU processes that stand for two nodes.
	$(BIN)/python examples/language_model.py fit --config examples/language_model.yaml $(DEMO_ARGS)

test: setup ## Run the whole test suite.
	$(BIN)/python -m pytest $(TEST_ARGS)

check: setup ## Lint, format and type checks.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Put the code into the project's format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-comm: setup ## Measure every codec against ddp on an emulated 2 x 2 cluster at four link rates (needs root).
	$(BIN)/python benchmarks/comm_sweep.py $(BENCH_ARGS)

clean: ## Remove .venv and all that runs leave behind.
	rm -rf $(VENV) runs lightning_logs checkpoints .mypy_cache .pytest_cache .ruff_cache
