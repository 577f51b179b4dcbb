# The vocabulary of development and of continuous integration. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The one wheel that carries NVIDIA's plugin headers (Apache-2.0); its own dependencies are not needed.
HEADERS := kernel-lens==2.0.1

# Processes that share the tests; each takes about 1 GB.
WORKERS ?= 2

# `make sanitize`: the checker, what of it to run, and the kernels that it watches. CONTRIBUTING.md has the reasons.
SANITIZER ?= compute-sanitizer
SANITIZER_TOOLS ?= memcheck racecheck initcheck
SANITIZER_KERNELS ?= kernel_substring=replay_
SANITIZED := tests/kernels/test_fresh_memory_gpu.py
OPTIONS_memcheck := --padding 512 --report-api-errors no --kernel-name $(SANITIZER_KERNELS)
OPTIONS_racecheck := --racecheck-report all --kernel-name $(SANITIZER_KERNELS)
OPTIONS_initcheck := --check-api-memory-access no
OPTIONS_synccheck := --kernel-name $(SANITIZER_KERNELS)

.DEFAULT_GOAL := help
.PHONY: help env demo test test-gpu soak sanitize lint types format all clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

env: $(READY)  ## Create the environment in .venv (Python 3.11 or newer and g++ are all it needs)

$(READY): Makefile pyproject.toml requirements-dev.txt tests/serving/triton/install_server.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; set PYTHON=python3.11 or newer" >&2; exit 2; }
	@command -v $${CXX:-g++} >/dev/null \
		|| { echo "error: no C++ compiler; install g++ or set CXX" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(HEADERS)
	$(BIN)/python -m tests.serving.triton.install_server
	@touch $@

demo: $(READY)  ## Convert, build, inspect and run the shipped model, with and without speculation
	$(BIN)/python examples/demo.py

test: $(READY)  ## Run the tests; those that need a GPU are skipped where there is none
	$(BIN)/python -m pytest -n $(WORKERS)

test-gpu: $(READY)  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu -n $(WORKERS)

soak: $(READY)  ## Run tens of thousands of disturbed requests against what each generates alone (some minutes)
	$(BIN)/python -m pytest -n $(WORKERS) tests/runtime/test_soak.py tests/runtime/test_soak_drafters.py --soak_requests 10000

sanitize: $(READY) $(SANITIZER_TOOLS:%=sanitize-%)  ## Run the kernels' short GPU tests under compute-sanitizer

sanitize-racecheck: export TRTLLM_REPLAYSSM_RACECHECK = 1

sanitize-compiled: $(READY)  # Plainly first: the tests must pass by themselves, and the kernels are in the cache then
	$(BIN)/python -m pytest -q -m gpu $(SANITIZED)

sanitize-%: sanitize-compiled
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $* --target-processes all --error-exitcode 1 \
		$(OPTIONS_$*) $(BIN)/python -m pytest -q -m gpu -p no:cacheprovider $(SANITIZED)

lint: $(READY)  ## Check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## Check types, strictly
	$(BIN)/mypy

format: $(READY)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

all: lint types test demo  ## What a change must pass, and what continuous integration runs

clean:  ## Remove the environment, what the demo wrote, and the tools' caches
	rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
