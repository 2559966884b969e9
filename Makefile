# Every target makes .venv if it is missing, or if pyproject.toml or C code has changed; a rerun installs nothing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
DOCS := .venv/.docs
SHORT := -m "not prove and not prove_library" -n 2 --dist worksteal
# Touches all that sbpc uses of torch's private parts.
SLICE := $(wildcard tests/test_compat*.py) tests/test_groups.py tests/test_module.py

# Makes a virtual environment if it is missing, and sets pip. A system's python3 may lack ensurepip; its own pip then installs.
environment = \
  $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
    { echo "sbpc needs Python 3.10 to 3.14, $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.11"; exit 1; }; \
  if [ ! -x $(1)/bin/python ]; then \
    $(PYTHON) -m venv $(1) >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip $(1) || \
    { echo "$(PYTHON) cannot make a virtual environment: it lacks the module venv. Install it (Debian: python3-venv)."; exit 1; }; fi; \
  python="$(CURDIR)/$(1)/bin/python"; \
  if "$$python" -m pip --version >/dev/null 2>&1; then pip="$$python -m pip"; else pip="$(PYTHON) -m pip --python $$python"; fi; \
  pip="$$pip --disable-pip-version-check"; \
  $$pip --version >/dev/null || { echo "$(PYTHON) has no pip of version 22.3 or later. Install it (Debian: python3-pip)."; exit 1; }

.NOTPARALLEL:
.PHONY: demo test test-newest test-oldest test-all-newest prove prove-library lint types docs clean

demo: $(READY)
	$(BIN)/sbpc demo

# Without files of bytecode every start of Python would compile sbpc, and every run of pytest its tests.
demo test prove prove-library: export PYTHONDONTWRITEBYTECODE =

test: $(READY)
	$(BIN)/python -m pytest $(SHORT)

# The wheel as users get it, with the newest torch that pip finds or the oldest that is promised, in an environment made anew:
# the demo runs before what the tests need is there, and both out of reach of the sources.
test-newest: TORCH = torch
test-oldest: TORCH = torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
test-newest test-oldest: export PYTHONPATH =
test-newest test-oldest: test-%:
	rm -rf .venv-$* build
	@$(call environment,.venv-$*); set -ex; \
	  $$pip wheel --quiet --no-deps --wheel-dir .venv-$*/wheel .; \
	  $$pip install --quiet "$$(echo .venv-$*/wheel/sbpc-*.whl)" '$(TORCH)'; \
	  (cd .venv-$*; bin/sbpc demo); \
	  $$pip install --quiet "$$(echo .venv-$*/wheel/sbpc-*.whl)[test]"; \
	  cp -R tests Makefile README.md pyproject.toml .venv-$*; cd .venv-$*; \
	  bin/python -c 'import sbpc, torch; print("torch", torch.__version__, "with", sbpc.__file__); assert "site-packages" in sbpc.__file__'; \
	  bin/python -m pytest $(SHORT) $(SLICE)

# All tests, on the newest torch.
test-all-newest: test-newest
	.venv-newest/bin/python -m pytest $(SHORT)

prove: $(READY) $(DOCS) test-oldest
	$(BIN)/python -m pytest -m prove -n 2 --dist worksteal --timeout 2400

prove-library: $(READY)
	$(BIN)/python -m pytest -m prove_library -n 2 --dist worksteal --timeout 2400

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

# The documentation as pages, of README, docstrings and examples: open build/docs/index.html.
docs: $(DOCS)
	$(BIN)/python examples/docs/build.py build/docs

clean:
	rm -rf .venv .venv-newest .venv-oldest build dist *.egg-info sbpc/boxing/*.so sbpc/solver/messages/*.so sbpc-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml $(wildcard sbpc/boxing/*.c sbpc/solver/messages/*.c)
	@$(call environment,.venv); \
	  echo "installing sbpc and its development tools into .venv: this takes some minutes, once"; \
	  $$pip install --quiet -e '.[dev]'
	@touch $(READY)

$(DOCS): $(READY)
	@$(call environment,.venv); $$pip install --quiet -e '.[docs]'
	@touch $(DOCS)
