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

.PHONY: run test test-deep lint peers clean

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
	@$(call timed,tests,$(BIN)/python -m pytest)
	@$(call timed,sanitized,MINFER_SANITIZE_CELLS=1 $(BIN)/python -m pytest $(SANITIZED))

# What takes too long for every change: half an hour on 2 cores.
test-deep: $(VENV)/.dev
	$(BIN)/minfer pull smollm2 && $(BIN)/minfer pull gemma3-270m
	@for how in $(MACHINES); do \
	  echo "--- machine, seed $$how"; \
	  $(BIN)/python -m minfer.testing --examples 2000 --steps 60 --seed $$how || exit $$?; \
	done
	@$(call timed,deep,$(BIN)/python -m pytest -m deep)
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

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.[cpu,models]' --constraint constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(call timed,install,$(PIP) install --quiet --editable '.[dev]' --constraint constraints.txt)
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
