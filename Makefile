# Quire's entry points. `make` alone lists them. Needs Python 3.11 or newer, make and a C++ compiler.

VENV := .venv
BIN := $(VENV)/bin
MODEL_DIR ?= $(HOME)/.cache/quire
MODEL ?= $(MODEL_DIR)/SmolLM2-135M-Instruct.Q4_1.gguf
QUESTION ?= Why is the sky blue? Answer in two sentences.
# An index with CPU builds of torch, where the default one has only large CUDA builds.
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

PROTOS := $(wildcard protos/quire/*/v1/*.proto)
PACKAGES := shared protos scheduler_svc worker_svc kernels quire_client cli bench deploy tests

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup model native portable proto lint test demo sim fuzz nightly chaos bench bench-scheduler bench-peers clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' \
	  | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

setup: $(VENV)/.stamp ## Make .venv with everything pinned (a second run does nothing)

$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python"; exit 1; }
	@echo "setup 1/3: virtual environment in $(VENV)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@echo "setup 2/3: packages, pinned in constraints.txt (some minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[worker,dev]'
	@echo "setup 3/3: done"
	@touch $@

model: $(MODEL) ## Get SmolLM2-135M-Instruct (Q4_1, checked by sha256)

$(MODEL): | $(VENV)/.stamp
	@PYTHON=$(abspath $(BIN))/python bash deploy/fetch_model.sh "$(MODEL_DIR)"

native: $(VENV)/.stamp ## Compile the native CPU kernels (cached by source)
	@$(BIN)/python -m kernels.cpu build

proto: $(VENV)/.stamp ## Generate the Python code of the .proto files
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

lint: $(VENV)/.stamp ## ruff, mypy and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	cd protos && ../$(BIN)/buf lint
	cd protos && ../$(BIN)/buf format -d --exit-code

portable: $(VENV)/.stamp
	@$(BIN)/python -m kernels.cpu build --isa portable

test: setup model ## Everything that must hold: lint and all tests
	$(MAKE) -j 2 --output-sync=target lint native portable
	QUIRE_TEST_MODEL="$(MODEL)" $(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/e2e
	QUIRE_TEST_MODEL="$(MODEL)" $(BIN)/python -m pytest --durations=8 tests/e2e

# SEEDS worlds from SEED on; SEED=S SEEDS=1 replays one that failed.
SEEDS ?= 100
SEED ?= 0
EVENTS ?= 500

sim: $(VENV)/.stamp ## Run SEEDS seeds of the scheduler's simulator, on all cores
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --seed $(SEED) --events $(EVENTS)

CALLS ?= 10000

fuzz: $(VENV)/.stamp ## CALLS random calls, and frames, at a real scheduler process
	$(BIN)/python -m tests.fuzz --calls $(CALLS) --seed $(SEED)

nightly: setup model native ## What takes too long for make test: 2,000 seeds, every end-to-end world
	$(MAKE) sim SEEDS=2000 EVENTS=500
	QUIRE_TEST_MODEL="$(MODEL)" $(BIN)/python -m pytest -m nightly tests/e2e

chaos: $(VENV)/.stamp ## 500 clients that leave at random: nothing of them may stay
	QUIRE_CHAOS=500 $(BIN)/python -m pytest -s tests/api/test_chaos.py

demo: setup model native ## Start a server, ask a question, stream the answer, stop the server
	@echo "Question: $(QUESTION)"
	@$(BIN)/quire serve --model "$(MODEL)" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 -- \
	  $(BIN)/quire generate --chat --max-tokens 200 --temperature 0 "$(QUESTION)"

bench: setup model native ## Load a server with 1 and 8 clients; figures to bench/results/
	@mkdir -p bench/results
	$(BIN)/quire serve --model "$(MODEL)" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 -- \
	  bash -c 'for clients in 1 8; do $(BIN)/quire bench --clients $$clients --requests $$((clients * 4)) \
	  --prompt-words 50 --max-tokens 64 --json bench/results/closed-$$clients.json || exit 1; done'

bench-scheduler: $(VENV)/.stamp ## Cost of scheduling a decode step of 256 and 1,024 sequences
	for running in 256 1024; do $(BIN)/python -m bench.scheduler --running $$running \
	  --waiting 100000 --json bench/results/scheduler-$$running.json || exit 1; done

bench-peers: setup model native ## Measure Quire beside llama-server and OpenVINO GenAI (sets them up)
	PYTHON=$(abspath $(BIN))/python bench/peers/setup.sh
	$(BIN)/python -m bench.peers --rounds 3 --model "$(MODEL)"

clean: ## Remove what the targets above made here (the model stays)
	rm -rf $(VENV) build kernels/cpu/build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/results
