# One virtual environment for everything: with uv where it is installed, else with pip.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: help demo test test-all test-page fuzz soak several-machines bench house check install clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(READY)  ## create .venv and install requirements.txt

demo: $(READY)  ## train on drawn flowers and open the exported page; about 10 minutes on 2 CPU cores (NO_OPEN=1: only export)
	$(call install_into_venv,-e ".[export]")
	$(BIN)/rectified-flow train --dataset synthetic-flowers --image_size 128 --autoencoder small --init_from starter --max_train_samples 1500 --budget 8m --one_step --output_dir runs/demo
	$(BIN)/rectified-flow export --checkpoint runs/demo/one-step --format page $(if $(NO_OPEN),,--open)

test: $(READY_DEV)  ## run the tests
	$(BIN)/python -m pytest

test-all: $(READY_DEV)  ## run the tests, including slow ones; takes some minutes more
	$(BIN)/python -m pytest -m "not page"

test-page: $(READY_DEV)  ## run an exported page and the studio in chromium, which is to be installed
	$(call install_into_venv,-e ".[studio]")
	$(BIN)/python -m pytest -m page -n 0

fuzz: $(READY_DEV)  ## test 2,000 random command lines, some 30 minutes
	FUZZ_CASES=2000 $(BIN)/python -m pytest -n 2 tests/test_fuzz.py

soak: $(READY_DEV)  ## train while processes are killed and files damaged, some 15 minutes
	$(BIN)/python -m tests.launch.soak --minutes 10

several-machines: $(READY_DEV)  ## train on two network namespaces: needs root
	$(BIN)/python -m tests.several_machines

bench: $(READY_DEV)  ## measure speed beside a peer, at most 12 minutes of a quiet CPU
	$(call install_into_venv,-e ".[benchmark]")
	$(BIN)/python benchmarks/bench.py

house: $(READY_DEV)  ## count files, lines, imports and flags
	$(BIN)/python scripts/house.py

check: $(READY_DEV)  ## lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove .venv; runs and caches stay
	rm -rf $(VENV)

# If the installation fails, the environment does not count as ready. Modules are compiled when they are first
# imported: compiling all of the packages here would take a minute.
unexport PYTHONDONTWRITEBYTECODE
define install_into_venv
	@if command -v uv >/dev/null 2>&1; then \
		([ -x $(BIN)/python ] || uv venv --quiet --python $(PYTHON) $(VENV)) && \
		uv pip install --quiet --python $(BIN)/python $(1); \
	else \
		([ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(1); \
	fi
endef

$(READY): requirements.txt
	@echo "installing requirements.txt into $(VENV) (a few GB where PyTorch comes with CUDA)"
	$(call install_into_venv,-r requirements.txt)
	@touch $@

$(READY_DEV): requirements.txt pyproject.toml
	@echo "installing the package with its development tools into $(VENV) (a few GB where PyTorch comes with CUDA)"
	$(call install_into_venv,-e ".[dev]")
	@touch $(READY) $@
