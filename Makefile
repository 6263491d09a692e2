# make demo    environment, corpus, training, evaluation, runs/demo/report.html
# make test    the CPU suite, at most 15 minutes on 2 cores
# make check   make test, lint, slow tests, compilation for an H200, experiments, the wheel: at most 55 minutes
# PYTHON=/path/to/python3.12 names the interpreter that makes .venv; ARGS="..." goes to the demo or to pytest.

PYTHON ?=
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
# A process for each of two cores; the tests of a file stay together, for they share what their fixtures compile.
PYTEST := $(PY) -m pytest --durations=15 --numprocesses=2 --dist=loadfile
JAX_VERSION := $(shell sed -n 's/^jax==//p' constraints.txt)
RUNS_OURS := import sys, venv, ensurepip; raise SystemExit(not (3, 12) <= sys.version_info[:2] <= (3, 14))

.PHONY: demo test check lint slow h200 smoke wheel clean
.DELETE_ON_ERROR:

# Each step maps and clears 200 MB afresh: huge pages save a tenth of the time (glibc only, ignored elsewhere).
demo: $(VENV)/.installed
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(PY) experiments/demo.py $(ARGS)

test: $(VENV)/.installed
	$(PYTEST) -m "not slow and not h200 and not gpu and not exhaustive" $(ARGS)

# One after another: each uses both cores, and the suite holds each room to a time budget.
# What one of them compiles, the next ones read.
check: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/build/programs
check: $(VENV)/.installed
	rm -rf build/programs
	$(MAKE) lint
	$(MAKE) test
	$(MAKE) slow
	$(MAKE) h200
	$(MAKE) smoke
	$(MAKE) wheel

lint: $(VENV)/.installed
	$(PY) -m ruff check .

slow: $(VENV)/.installed
	$(PYTEST) -m "slow and not h200 and not gpu and not exhaustive" $(ARGS)

# The plugin stays out of .venv: with it on the path, every run on a CPU would look for a GPU first.
h200: $(VENV)/.installed .h200/.installed
	env -u JAX_COMPILATION_CACHE_DIR PYTHONPATH=$(CURDIR)/.h200 $(PYTEST) -m "h200 and not gpu and not exhaustive" $(ARGS)

smoke: $(VENV)/.installed
	rm -rf build/smoke
	$(PY) experiments/demo.py --smoke --run-dir build/smoke/demo
	$(PY) experiments/longer_text.py --smoke --corpus build/smoke/demo/corpus --run-dir build/smoke/longer_text
	for name in balancing attn_residuals hybrid_ratio one_part beyond_length; do \
	  $(PY) experiments/$$name.py --smoke --corpus build/smoke/demo/corpus --run-dir build/smoke/$$name || exit 1; done
	$(PY) experiments/planted_facts.py --smoke --run-dir build/smoke/planted_facts
# Nearly all of their time is compilation.
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PY) experiments/synthetic_recall.py --smoke --run-dir build/smoke/synthetic_recall
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PY) experiments/bounded_decay.py --smoke --corpus build/smoke/demo/corpus --run-dir build/smoke/bounded_decay

wheel: $(VENV)/.installed
	rm -rf build/wheel build/wheel-env
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PY) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt build/wheel/longmoe-*.whl
	cd build/wheel && ../wheel-env/bin/python -c "import pallas_kernels, longmoe, sys; \
	  assert 'wheel-env' in longmoe.__file__, longmoe.__file__; print(pallas_kernels.kernel_report()); longmoe.presets.nano()"

$(VENV)/.installed: pyproject.toml constraints.txt
	@if [ -x $(PY) ] && $(PY) -c '$(RUNS_OURS)' >/dev/null 2>&1; then exit 0; fi; \
	rm -rf $(VENV); \
	if [ -n "$(PYTHON)" ]; then \
	  "$(PYTHON)" -c '$(RUNS_OURS)' || { echo "PYTHON=$(PYTHON): wanted Python 3.12 to 3.14 with the venv and ensurepip modules" >&2; exit 1; }; \
	  exec "$(PYTHON)" -m venv $(VENV); \
	fi; \
	for candidate in python3.12 python3.13 python3.14 python3 \
	    "$$HOME"/.pyenv/versions/*/bin/python3 "$$(pyenv root 2>/dev/null)"/versions/*/bin/python3; do \
	  if "$$candidate" -c '$(RUNS_OURS)' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$candidate"; exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	if command -v uv >/dev/null 2>&1; then exec uv venv --seed --python 3.12 $(VENV); fi; \
	echo "No Python 3.12, 3.13 or 3.14 with the venv module was found (JAX needs 3.12 or newer). Install one (apt install python3.12 python3.12-venv," >&2; \
	echo "brew install python@3.12, pyenv install 3.12) or uv (it fetches its own), or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	exit 1
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

.h200/.installed: constraints.txt $(VENV)/.installed
	rm -rf .h200
	$(PY) -m pip install --quiet --no-deps --target .h200 jax-cuda13-plugin==$(JAX_VERSION) jax-cuda13-pjrt==$(JAX_VERSION)
	@touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache *.egg-info
