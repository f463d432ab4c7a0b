# Two commands: `make demo` and `make test`. Both set everything up in the checkout first.
PYTHON ?= python3.11
VENV := .venv
SGLANG := .venv-sglang
PIP_FLAGS := --quiet --disable-pip-version-check
export PYTHONUNBUFFERED := 1

.PHONY: setup demo test test-long stack-test check format leaks audit clean

setup: $(VENV)/.ready $(SGLANG)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml server_patch/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "Eyas needs Python 3.11 and '$(PYTHON)' is not one. Install it, or say where it is: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setup: the pipeline's environment in $(VENV) (about 2 minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install $(PIP_FLAGS) -r requirements.lock
	@$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e . -e server_patch
	@touch $@

$(SGLANG)/.ready: infra/sglang_cpu/requirements.txt infra/sglang_cpu/requirements-nodeps.txt infra/sglang_cpu/pyproject.toml server_patch/pyproject.toml
	@echo "setup: SGLang for a CPU in $(SGLANG) (about 2 minutes the first time)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/pip install $(PIP_FLAGS) -r infra/sglang_cpu/requirements.txt
	@$(SGLANG)/bin/pip install $(PIP_FLAGS) --no-deps -r infra/sglang_cpu/requirements-nodeps.txt
	@$(SGLANG)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e infra/sglang_cpu -e server_patch
	@touch $@

demo: setup
	@$(VENV)/bin/python -m infra.demo
	@$(VENV)/bin/eyas run demo-smollm2

test: setup check
	@$(VENV)/bin/python -m infra.demo
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long"

# Every command of the papers; schedules, kills, retries under a real Prefect server; a work pool; two hosts (35 minutes).
test-long: setup
	@$(VENV)/bin/python -m infra.demo
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -m long

check: setup
	@$(VENV)/bin/ruff format --check --quiet . || { echo "formatting differs; run: make format"; exit 1; }
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy

# A whole run with Prefect and MLflow on PostgreSQL (part of `make test` too; skipped where PostgreSQL is missing).
stack-test: setup
	@$(VENV)/bin/python -m pytest tests/flows/test_given_services.py tests/infra/test_package_stack.py

# Keys and passwords in the repository's files; what is known and harmless stands in .secrets.baseline.
leaks: setup
	@$(VENV)/bin/detect-secrets-hook --baseline .secrets.baseline $$(git ls-files) && echo "no key or password in the files"

# Needs the network: asks PyPI's advisories about every pinned package. Strict: a package it cannot ask about is a failure.
audit: leaks
	@$(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install $(PIP_FLAGS) pip-audit==2.10.1
	@.venv-audit/bin/pip-audit --strict --requirement requirements.lock --no-deps --disable-pip --progress-spinner off

format: setup
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) $(SGLANG) .venv-audit .mypy_cache .ruff_cache .pytest_cache
