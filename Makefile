# Everything starts here: `make demo`, `make serve`, `make test`. Needs Linux on x86_64 and Python 3.11 with venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
REPOSITORY ?= model_repository
PROMPT ?= The session table is
WORKERS ?= 2
STAMP := $(VENV)/.installed

# As in tools/corolla/threads.py.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo serve test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 with venv" \
		"(Debian 12: apt-get install python3 python3-venv), or pass PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m corolla.server.libpython
	touch $@

demo: setup
	$(BIN)/corolla demo-checkpoint
	$(BIN)/corolla demo $(REPOSITORY) "$(PROMPT)"

serve: setup
	$(BIN)/corolla demo-checkpoint
	$(BIN)/corolla serve $(REPOSITORY) --log-file server.log --examples

lint: setup
	$(BIN)/ruff check
	$(BIN)/mypy

test: lint
	$(BIN)/corolla demo-checkpoint
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadgroup

clean:
	rm -rf $(VENV) .cache build server.log .mypy_cache .ruff_cache .pytest_cache tools/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
