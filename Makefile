# `make run` and `make test` each work alone on a machine with Python 3.11, pip and make.

PYTHON ?= python3
VENV ?= .venv
PEERS = .venv-peers
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
PROMPT ?= The capital of France is
QUESTION ?= Why is the sky blue? Answer in two sentences.

# Tests of the store and of what runs on it, which `test` runs once more under the sanitizer.
SANITIZED = $(filter-out %_machine.py,$(wildcard tests/test_step*.py tests/test_store*.py)) \
  $(wildcard tests/test_cop*.py) \
  tests/test_sharing.py tests/test_compaction.py tests/test_resize.py tests/test_removal.py \
  tests/test_planes.py tests/test_engine.py tests/test_graph.py tests/test_smollm2_store.py

# One run of the store machine each: seed and how the store is made.
MACHINES = "0 --cache-type f32" "1 --cache-type f16 --sanitize" "2 --cache-type q8_0" \
  "3 --cache-type q8_0 --n-ctx 24 --sanitize" "4 --cache-type f32 --n-ctx 12 --sanitize"

# What Triton's interpreter runs of the CUDA backend without a GPU. The other tests of tests/triton can
# be run so too, which takes minutes.
INTERPRETED = tests/kernels tests/triton/test_split_triton.py tests/triton/test_engine_triton.py
OLD_TRITON = 3.6.0

# What `memcheck` runs under NVIDIA's sanitizer, which makes kernels 10 to 100 times slower.
CHECKED = "tests/kernels/test_attention.py -k float32 and not large and (drafts or sliding or batch)" \
  "tests/kernels/test_cells_kernels.py -k store and not many and not 300" \
  "tests/kernels/test_move_cells.py -k 3x32 or 2x32" \
  "tests/triton/test_split_triton.py -k programs or groups" \
  "tests/kernels/test_products.py -k close and 17-257"

# What the Metal simulator runs of the MLX backend, and its own tests.
SIMULATED = tests/kernels tests/metal tests/metalsim

# Two processes, each of which takes tests as it gets done; by file where files share what they set up.
TWO = $(BIN)/python -m pytest -n 2 --dist worksteal
BY_FILE = $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: run test test-cuda test-metal test-deep memcheck lint compile peers clean

run: $(VENV)/.run
	$(BIN)/minfer pull smollm2
	@for type in f32 f16 q8_0; do \
	  printf '\n--- %s ... (cache %s)\n' "$(PROMPT)" $$type; \
	  $(BIN)/minfer run smollm2 -p "$(PROMPT)" -n 16 --cache-type $$type || exit $$?; \
	done
	@printf '\n--- %s (chat, cache q8_0)\n' "$(QUESTION)"
	@$(BIN)/minfer run smollm2 -p "$(QUESTION)" --chat --cache-type q8_0 --receipt

test: $(VENV)/.dev lint
	@$(call timed,models,$(BIN)/minfer pull smollm2 && $(BIN)/minfer pull gemma3-270m)
	@$(call timed,tests,$(BY_FILE) --ignore=tests/metalsim)
	@$(call timed,sanitized,MINFER_SANITIZE_CELLS=1 $(BY_FILE) $(SANITIZED))
	@$(call timed,interpreted,TRITON_INTERPRET=1 $(TWO) --on cuda $(INTERPRETED))
	@$(call timed,simulated,$(TWO) --on metal $(SIMULATED))
	@$(MAKE) compile

# Every kernel of the CUDA backend by the compilers that come with two versions of Triton; by the older
# one for sm_90, which is what it was measured on.
compile: $(VENV)/.dev $(VENV)/.triton-$(OLD_TRITON)
	@$(call timed,compiled,$(compiled))
	@$(call timed,compiled by Triton $(OLD_TRITON),PYTHONPATH=$(VENV)/triton-$(OLD_TRITON) \
	  $(BIN)/python -m tuning compile --arch 90)

# On a machine with a GPU, by its own Python: numpy, pytest, torch and triton; nothing is installed.
test-cuda:
	$(PYTHON) -m pytest -p no:cacheprovider --on cuda tests/kernels tests/triton

# There too, with NVIDIA's compute-sanitizer: reads and writes out of bounds, races in shared memory.
memcheck:
	@command -v compute-sanitizer > /dev/null || { echo 'needs compute-sanitizer, which comes with the' \
	  'CUDA toolkit; put its folder on PATH' >&2; exit 2; }
	@for tool in memcheck racecheck; do for tests in $(CHECKED); do \
	  echo "--- $$tool: $$tests"; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PYTHON) -m pytest -q -p no:cacheprovider --on cuda \
	    $${tests%% *} -k "$${tests#* -k }" || exit $$?; \
	done; done

# On a Mac with Apple silicon, on its GPU.
test-metal: $(VENV)/.dev
	$(BIN)/minfer pull smollm2
	$(BIN)/python -m pytest -p no:cacheprovider --on metal tests/kernels tests/metal

# What takes too long for every change: half an hour on 2 cores.
test-deep: $(VENV)/.dev
	$(BIN)/minfer pull smollm2 && $(BIN)/minfer pull gemma3-270m
	@for how in $(MACHINES); do \
	  echo "--- machine, seed $$how"; \
	  $(BIN)/python -m minfer.testing --examples 2000 --steps 60 --seed $$how || exit $$?; \
	done
	@$(call timed,deep,$(BIN)/python -m pytest -m deep)
	@$(call timed,fuzzed,$(BIN)/python tests/fuzz/session.py --seconds 300)
	@$(call timed,compiled,$(BIN)/python -m tuning compile --defaults --spills 64 \
	  --head-dim 16 32 64 80 96 128 256 --mode causal span runs)
	@$(call timed,sanitized,MINFER_SANITIZE_CELLS=1 $(BIN)/python -m pytest)

lint: $(VENV)/.dev
	@$(call timed,ruff check,$(BIN)/ruff check .)
	@$(call timed,ruff format,$(BIN)/ruff format --check .)
	@$(call timed,mypy,$(BIN)/mypy)

# ggml and torch for `python -m tuning bench --peers`. llama-cpp-python is built from source for
# this CPU: that takes a C++ compiler and some minutes.
peers: $(PEERS)/.done

$(PEERS)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install '.[peers]' --constraint constraints.txt
	touch $@

# $(call timed,what,command): run it and say how long it took.
timed = start=$$(date +%s); $(2) || exit $$?; echo "== $(1): $$(($$(date +%s) - start)) s"

# $(call compiled,where triton is): sm_90 every variant, elsewhere what is chosen unnamed.
compiled = $(BIN)/python -m tuning compile --arch 90 && \
  $(BIN)/python -m tuning compile --arch 80 100 --defaults

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.[cpu,models]' --constraint constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(call timed,install,$(PIP) install --quiet --editable '.[dev]' --constraint constraints.txt)
	touch $@ $(VENV)/.run

$(VENV)/.triton-$(OLD_TRITON): | $(VENV)/.dev
	$(PIP) install --quiet --no-deps --target $(VENV)/triton-$(OLD_TRITON) triton==$(OLD_TRITON)
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
