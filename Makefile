# fedexp: two commands matter: make demo, make test. Each sets up .venv first if it has to.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Prints the folder of the checkout that the environment's fedexp is imported from.
CHECKOUT := import importlib.util as u, pathlib as p; print(p.Path(u.find_spec('fedexp').origin).resolve().parents[1])
export WANDB_MODE ?= offline

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick corpus check format bench site wheel clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the tested versions

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedexp needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@other=$$($(BIN)/python -I -c "$(CHECKOUT)" 2>/dev/null) || true; \
	if test -n "$$other" && test "$$other" != "$$(pwd -P)"; then \
		echo "$(VENV) is shared: its fedexp is the checkout $$other, and becomes $$(pwd -P)."; \
		echo "For an environment of this checkout only: make VENV=.venv-own $(MAKECMDGOALS)"; \
	fi
	@echo "installing the tested versions into $(VENV) (once, a few minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## run the main job and a small table on scikit-learn's digits
	@$(BIN)/fedexp
	@$(BIN)/fedexp-table run demo/digits

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -n 2 --durations 20

quick: $(STAMP) ## run the tests of the core's contracts, in half a minute
	@$(BIN)/python -m pytest -n 2 tests/core tests/methods/test_averaging.py

corpus: $(STAMP) ## give the commands every wrong input of tests/cli, in two minutes
	@$(BIN)/python -m pytest -m corpus tests/cli

check: $(STAMP) ## lint, format, spelling, types and generated tables
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/mypy
	@$(BIN)/python scripts/make_readme.py --check

format: $(STAMP) ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## compare fedexp's seconds per round with those of a plain PyTorch loop (needs Fashion-MNIST in ./data or FEDEXP_DATA)
	@$(BIN)/python scripts/bench_rounds.py

site: ## build the site of documentation and results, outputs/site/index.html
	@test -x $(BIN)/python || { echo "make site installs nothing, and there is no $(BIN)/python: run make setup"; exit 1; }
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: $(STAMP) ## build the wheel and try it in a clean environment
	@bash scripts/test_wheel.sh "$(abspath $(BIN))/python"

clean: ## remove the environment and caches (outputs/ and data/ stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
