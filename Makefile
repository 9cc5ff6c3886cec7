# Everything a clone needs: `make quickstart` to see it work, `make test` to prove it, `make check` for all that CI runs.
# Exact versions come from constraints.txt; the environment is .venv and is made again only when they change.
# `make test PYTHON=python3.12 JAX=0.11.2` does the same with another interpreter, another JAX, or both, in an environment
# of its own (.venv-python3.12-jax0.11.2).

SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON  :=
JAX     :=
VENV    := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))$(if $(JAX),-jax$(JAX))
PY      := $(VENV)/bin/python
PINS    := $(if $(JAX),$(VENV)/constraints.txt,constraints.txt)
PIP     := $(PY) -m pip install --progress-bar off --disable-pip-version-check --no-input -c $(PINS)
# Pip's large downloads and its last step: a silent minute looks like a hang. Its warnings are left out, its errors are not.
STEPS   := 2> >(grep -v '^WARNING' >&2) | awk '/Downloading .*\((.* GB|[0-9][0-9.]+ MB)\)/ \
             {split($$2, name, "-"); print "  downloading " name[1] " " substr($$0, index($$0, "(")); fflush()} \
             /^Installing collected/ {print "  unpacking " NF - 3 " packages"; fflush()}'
RUN     := $(VENV)/.installed-run
TEST    := $(VENV)/.installed-test
OUTPUT  ?= runs/quickstart
PYTEST  := $(PY) -m pytest
JOBS    ?= 2
# Apart from .venv: JAX would load every plugin it finds there, in runs that have no use for it.
COMPILERS := .compilers
# Other tools, each in an environment of its own with the versions that it asks for.
PEERS := .peers

.DEFAULT_GOAL := help
.PHONY: help quickstart install test test-changed test-slow test-peers test-board test-gpu test-deviceless test-fuzz check lint format types lock lock-images wheel docs notebooks clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

quickstart: $(RUN) ## Tune a tiny real model on this machine, in under two minutes
	@$(VENV)/bin/meshtune quickstart --output $(OUTPUT)

install: $(TEST) ## Make .venv with everything, tests and linters included

test: $(TEST) ## The fast tests: minutes, CPU; JOBS=1 for one process
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=25

test-changed: $(TEST) ## The fast tests of what changed since a commit: BASE=main, by default what is not committed
	@tests=$$($(PY) tests/changed.py $(or $(BASE),HEAD)); if [ -z "$$tests" ]; then echo "no test imports what changed"; \
	  else $(PYTEST) -n $(JOBS) --dist loadfile $$tests; fi

test-slow: $(TEST) ## Tests on a real 135M model, or of minutes of CPU time
	$(PYTEST) -m slow

test-peers: $(TEST) $(PEERS)/llamafactory/.installed $(PEERS)/axolotl/.installed ## Files of LLaMA-Factory and axolotl, run by these tools and by us
	MESHTUNE_PEERS=$(CURDIR)/$(PEERS) $(PYTEST) -m slow tests/train/test_peer_trainers.py

test-board: $(TEST) ## The board in a real Chromium (Debian's, installed if it is missing, as root)
	@command -v chromedriver >/dev/null || { apt-get update -q && apt-get install -y -q chromium chromium-driver; }
	@$(PIP) -e '.[browser]' $(STEPS)
	@[ -e node_modules/axe-core ] || [ -n "$$MESHTUNE_AXE" ] || npm install --no-save --no-audit --no-fund --silent axe-core || \
	  echo "npm is missing, or could not install axe-core: tests that look for barriers will fail (apt install npm)" >&2
	$(PYTEST) -m browser tests/board

test-gpu: $(TEST) ## Tests that need an accelerator
	$(PYTEST) -m gpu

test-deviceless: $(TEST) $(COMPILERS)/.installed ## Compile for accelerators that are not here
	MESHTUNE_COMPILERS=$(CURDIR)/$(COMPILERS) $(PYTEST) -m deviceless

test-fuzz: $(TEST) ## Thousands of damaged and hostile files at every reader, ten minutes at most; SEED=1 for others
	MESHTUNE_FUZZ_SEED=$(or $(SEED),0) $(PYTEST) -n $(JOBS) -m fuzz tests/fuzz

check: lint types test ## All that CI runs: format, lint, types, fast tests

lint: $(TEST) ## Formatting and lint, of the workflows too, changing nothing
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/jactionlint --no-hints --shellcheck=$(VENV)/bin/shellcheck

types: $(TEST) ## Static types
	$(VENV)/bin/pyright

format: $(TEST) ## Format, and fix what lint can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

translations: $(TEST) ## List the texts of the board that are not translated
	@$(PY) tests/board/translations.py

lock: $(TEST) ## Write the versions in .venv to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; $(PY) -m pip freeze --disable-pip-version-check --exclude-editable 2>/dev/null \
	  | grep -E '^[A-Za-z0-9._-]+==' | sed 's/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt

lock-images: $(TEST) ## Write the hashes of the images' packages to docker/requirements-*.txt (Python 3.11, x86-64)
	$(PY) docker/lock.py cpu serve,evaluate,synth
	$(PY) docker/lock.py cuda cuda13,serve,evaluate,synth
	$(PY) docker/lock.py tpu tpu,serve,evaluate,synth

wheel: $(TEST) ## Build wheel and source distribution into dist/, and check them in a fresh environment
	@$(PIP) -e '.[release]' $(STEPS)
	rm -rf dist && $(PY) -m build --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(PY) tests/release/check_dist.py dist

docs: $(TEST) ## Build the pages as a site into build/site; a broken link ends it
	@$(PIP) -e '.[docs]' $(STEPS)
	$(PY) docs/gather.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

notebooks: $(TEST) ## Write examples/notebooks as build/notebooks/*.ipynb, for Colab, Kaggle and Jupyter
	@mkdir -p build/notebooks
	@for name in $$(cd examples/notebooks && ls *.py); do $(PY) -m jupytext --quiet --to ipynb \
	  --update-metadata '{"kernelspec": {"name": "python3", "display_name": "Python 3"}, "accelerator": "GPU"}' \
	  -o build/notebooks/$${name%.py}.ipynb examples/notebooks/$$name; done
	@ls build/notebooks/*

$(COMPILERS)/.installed: constraints.txt | $(TEST)
	@echo "Getting XLA's compilers for NVIDIA, AMD and TPU into $(COMPILERS) (half a gigabyte each, once)"
	@MESHTUNE_COMPILERS=$(CURDIR)/$(COMPILERS) $(VENV)/bin/meshtune doctor --install all --check
	@touch $@

$(PEERS)/%/.installed: tests/train/peers/%.txt | $(PY)
	@echo "Installing $* into $(PEERS)/$* (a gigabyte, once)"
	@rm -rf $(@D) && $(PY) -m venv $(@D)
	@grep -v '^$*==' $< > $(@D)/needs.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r $(@D)/needs.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps $$(grep '^$*==' $<)
	@touch $@

clean: ## Remove what was built; .venv and runs stay
	rm -rf build dist .pytest_cache .ruff_cache src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@for name in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
	  if $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then found=$$name; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Meshtune needs Python 3.11, 3.12 or 3.13, and $(or $(PYTHON),none of python3.11 ... python3 on the PATH) is $(if $(PYTHON),not )one." >&2; \
	  echo "Install one (such as: apt install python3.11 python3.11-venv), then run make again." >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$found"; \
	$$found -m venv $(VENV) || { echo "Could not make $(VENV): on Debian and Ubuntu, apt install $$found-venv" >&2; rm -rf $(VENV); exit 1; }

ifneq ($(JAX),)
$(PINS): constraints.txt | $(PY)
	@sed -E 's/^(jax|jaxlib)==.*/\1==$(JAX)/' constraints.txt > $@
endif

$(RUN): pyproject.toml $(PINS) | $(PY)
	@echo "Installing Meshtune and what it needs (minutes, the first time)"
	@$(PIP) -e . $(STEPS)
	@touch $@

$(TEST): pyproject.toml $(PINS) | $(PY)
	@echo "Installing Meshtune, what it needs and what its tests need (minutes, the first time)"
	@$(PIP) -e '.[test,dev]' $(STEPS)
	@touch $@ $(RUN)
