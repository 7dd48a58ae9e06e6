# make demo, make test and make lint set up .venv themselves, once for each version of pyproject.toml.
#   PYTHON=python3.12   the Python for .venv (3.11 or later)
#   EXTRAS=dev,bench    which extras go into it; gpu is added where there is an NVIDIA GPU
#   ARGS=...            arguments of the demo or of pytest

PYTHON ?= python3
EXTRAS ?= dev,bench$(shell nvidia-smi -L >/dev/null 2>&1 && echo ,gpu)
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test lint clean

demo: $(READY)
	$(RUN) -m benchmarks.demo $(ARGS)

test: $(READY)
	$(RUN) -m pytest $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf .venv .venv312 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)'; name your Python: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fusedops needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) and the extras $(EXTRAS) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@
