# Everything here makes its own environment first, in .venv: PYTHON=python3.12 make test chooses what it is made with.
PYTHON ?= python3
BIN := .venv/bin
# One environment for all targets: beside torch, what the tests and linters add to the demo's packages is small.
INSTALLED := .venv/installed

# Where an image sets it, all of torch would be compiled anew by every process that tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint audit bench

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Jostle the shipped language model, and draw jostle-demo/words.png
	$(BIN)/jostle demo

test: $(INSTALLED) ## Run every test
	# Models here are tiny: one thread each, and one file more at once than there are cores, in the order of tests/conftest.py.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

bench: $(INSTALLED) ## See that nothing became twice as slow, by ratios
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run small --check benchmarks/records/small.json

lint: $(INSTALLED) ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

audit: $(INSTALLED) ## Ask whether a pinned dependency has a known vulnerability
	$(BIN)/python .ci/audit.py

# The stamp is written last, so an installation that was interrupted is done again.
$(INSTALLED): pyproject.toml constraints.txt
	# The pip that comes with Python may be years old, and takes twice as long.
	$(PYTHON) -m venv --upgrade-deps .venv
	# Most modules are never imported: those that are, Python compiles then.
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# kronfluence asks for torchvision and never imports it; without that, EK-FAC is small.
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt --no-deps kronfluence einconv opt_einsum einops
	@touch $@
