# Every target makes .venv if it is missing, or if pyproject.toml or C code has changed; a rerun installs nothing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test test-newest prove prove-library lint types clean

demo: $(READY)
	$(BIN)/sbpc demo

test: $(READY)
	$(BIN)/python -m pytest -m "not prove and not prove_library" -n 2 --dist worksteal

# The newest torch that the registry has, in an environment of its own, made anew; the build for CPUs is enough.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	.venv-newest/bin/python -c 'import torch; print("torch", torch.__version__)'
	.venv-newest/bin/python -m pytest -m "not prove and not prove_library" -n 2 --dist worksteal

prove: $(READY)
	$(BIN)/python -m pytest -m prove -n 2 --dist worksteal --timeout 2400

prove-library: $(READY)
	$(BIN)/python -m pytest -m prove_library -n 2 --dist worksteal --timeout 2400

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-newest build dist *.egg-info sbpc/boxing/*.so sbpc/solver/messages/*.so sbpc-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A system's python3 may lack ensurepip; its own pip then installs into .venv.
$(READY): pyproject.toml $(wildcard sbpc/boxing/*.c sbpc/solver/messages/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "sbpc needs Python 3.10 to 3.13, $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.11"; exit 1; }
	@if [ ! -x $(BIN)/python ]; then \
	  $(PYTHON) -m venv .venv >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip .venv || \
	  { echo "$(PYTHON) cannot make a virtual environment: it lacks the module venv. Install it (Debian: python3-venv)."; exit 1; }; fi
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then pip="$(BIN)/python -m pip"; else pip="$(PYTHON) -m pip --python $(BIN)/python"; fi; \
	  $$pip --version >/dev/null || { echo "$(PYTHON) has no pip of version 22.3 or later. Install it (Debian: python3-pip)."; exit 1; }; \
	  echo "installing sbpc and its development tools into .venv: this takes some minutes, once"; \
	  $$pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(READY)
