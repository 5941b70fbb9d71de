# `make run` and `make test` each work alone on a machine with Python 3.11, pip and make.

PYTHON ?= python3
VENV ?= .venv
PEERS = .venv-peers
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
PROMPT ?= The capital of France is
QUESTION ?= Why is the sky blue? Answer in two sentences.

.PHONY: run test lint peers clean

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
