PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test chaos lint proto install clean

install: $(VENV)/.installed

# One environment for every target; made again only when what it installs has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

# The main job on the embedded model: how many requests per second meet a latency limit on this machine?
demo: install
	$(BIN)/dbench search-capacity --model embedded --gpus cpu --trace arxiv --length-scale 0.05 --num-requests 125 \
	  --unmasking-strategy conf_quota --fixed-unmask-quota 2 \
	  --sla 'request_e2e_time:p90<=2s' --min-search-granularity-pct 10 --name demo

test: lint
	$(BIN)/python -m pytest

# Ten times the requests of the test of the same name in `make test`.
chaos: install
	$(BIN)/python -m pytest tests/serve/test_chaos.py --chaos-requests 2000

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. dbench/serve/proto/dbench.proto

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
