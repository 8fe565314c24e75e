# Everything a newcomer needs: `make demo` and `make test`. Both set up their own environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ultralytics,yolonas,landing,onnx]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m experiments.demo -o demo

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks experiments
	$(BIN)/ruff format --check src tests benchmarks experiments
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) demo build dist
