# Each target works on a fresh checkout: setup.py makes .venv, and does nothing when nothing changed.

PYTHON ?= python3
MODEL ?= smollm2:135m
# A small model may find no end: an answer to PROMPT has so many tokens at most.
TOKENS ?= 500
ARGS ?=
PKG ?=
# One more than there are cores: tests wait for servers, clients and programs a fifth of their time.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
BIN := .venv/bin
# The files of tests as tests/times.txt orders them, not those with the most tests first.
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
QUESTION := What is the capital of France? Answer in one short sentence.

# Only from the command line: shells that export their own PROMPT would otherwise send it to the model.
ifeq ($(origin PROMPT),command line)
override PROMPT := $(value PROMPT)
else
override PROMPT :=
endif
export PROMPT QUESTION

.PHONY: help run native test test-all quick watch explore check format docs screens dist bench clean FORCE

help:
	@echo 'make run                  answer a question with a small model; in a terminal: chat with it'
	@echo 'make run PROMPT="..."     answer yours, in 500 tokens at most (TOKENS=n for others)'
	@echo 'make native               compile the tensor library for this CPU: faster than the prebuilt one'
	@echo 'make test                 what every change must pass, on all cores (ARGS="-k name" for some, JOBS=0 one after another)'
	@echo 'make test-all             every test there is, as a merge runs them'
	@echo 'make quick PKG=gguf       checks, and the unit tests of one package'
	@echo 'make watch PKG=gguf       the same again whenever a file changes'
	@echo 'make explore              tests that draw examples draw other ones (SEED=n: those of a run before)'
	@echo 'make check                format, lint, types, imports'
	@echo 'make format               bring the code into the expected format'
	@echo 'make docs                 write what documents and the manual take from code and tests'
	@echo 'make screens              make the pictures of the page in the documents anew'
	@echo 'make dist                 wheel and source archive, into dist/'
	@echo 'make bench                measure the engine against libllama'
	@echo 'make clean                remove .venv and caches (compiled libraries stay in the user cache)'

.venv/.ready: FORCE
	@$(PYTHON) tools/setup.py

# In place of it for what tests and checks need beside.
.PHONY: .venv/dev
.venv/dev: FORCE
	@$(PYTHON) tools/setup.py --dev

run: .venv/.ready
	@if [ -n "$$PROMPT" ]; then exec $(BIN)/puna run -o num_predict=$(TOKENS) $(MODEL) -- "$$PROMPT" </dev/null; \
	elif [ -t 0 ] && [ -t 1 ]; then exec $(BIN)/puna run $(MODEL); \
	else exec $(BIN)/puna run -o temperature=0 -o num_predict=64 $(MODEL) -- "$$QUESTION" </dev/null; fi

native: .venv/.ready
	$(BIN)/puna native build $(ARGS)

test: .venv/dev
	$(BIN)/pytest -n $(JOBS) $(BY_FILE) -m "not thorough" $(ARGS)

test-all: .venv/dev
	$(BIN)/pytest -n $(JOBS) $(BY_FILE) $(ARGS)

quick: .venv/dev
	$(BIN)/python -m tools.check
	$(BIN)/pytest -x -q -m "not thorough" tests/unit/$(PKG) $(ARGS)

watch: .venv/dev
	$(BIN)/watchfiles --filter python "make quick PKG=$(PKG)" src tests

explore: .venv/dev
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "The same examples once more: make explore SEED=$$seed"; \
	$(BIN)/pytest -n $(JOBS) -m hypothesis --hypothesis-profile=explore --hypothesis-seed=$$seed $(ARGS)

check: .venv/dev
	$(BIN)/python -m tools.check

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/dev
	$(BIN)/python -m tools.models_table
	$(BIN)/python -m tools.manual
	$(BIN)/python -m tools.picture
	$(BIN)/python -m tools.dashboard

dist: .venv/dev
	rm -rf dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build

screens: .venv/dev
	PUNA_SCREENS=docs/guides/screens $(BIN)/pytest -q tests/e2e/test_web_engine.py

bench: .venv/dev
	$(BIN)/python -m bench.engine $(ARGS)
	$(BIN)/python -m bench.first_token

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
