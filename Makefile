# Everything a newcomer needs: `make demo` and `make test`. All targets set up their own environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: cpp demo test test-core test-landing lint docs dist smoke bench clean

CODE   := src tests benchmarks research examples models docs/_site
EXTRAS := dev,docs,ultralytics,yolonas,landing,recordings,rerun,studies,onnx,ray,cloud,models

$(VENV)/.ready: pyproject.toml models/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./models -e '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m research.demo -o demo

# Fails below 95 % of lines; build/coverage.txt lists the lines that no test runs. The floor is checked by a second command,
# because slipcover drops the lines of parallel test processes from its report when it also checks a floor.
test: $(VENV)/.ready lint
	mkdir -p build
	$(BIN)/python -m slipcover --json --out build/coverage.json -m pytest -n auto --dist loadfile --durations=10
	$(BIN)/python -m slipcover --merge build/coverage.json --out build/merged.json --fail-under 95 > build/coverage.txt \
	  || { echo "less than 95 % of lines are run by tests: see build/coverage.txt"; exit 1; }
	@tail -1 build/coverage.txt | awk '{ print "lines: " $$2 ", not run: " $$3 ", run: " $$4 " % (build/coverage.txt)" }'

test-core: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist loadfile --ignore tests/landing

test-landing: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist loadfile tests/landing

lint: $(VENV)/.ready
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	test ! -x $(BIN)/lint-imports || $(BIN)/lint-imports  # which Python 3.10 does not have

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Both distributions, whole and readable; `make smoke` then installs them in an empty environment.
dist: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist models
	$(BIN)/twine check --strict dist/*

smoke: dist
	CONSTRAINTS=$(CURDIR)/constraints.txt .ci/smoke dist

# The C++ example, built and compared with predict.py; PHOTOS=folder for other photographs than the shipped ones.
cpp: $(VENV)/.ready
	$(BIN)/halopose export --form end2end -o build/end2end
	$(BIN)/python examples/cpp/check.py build/end2end/model.onnx $(PHOTOS)

# About ten minutes of all cores. To see what a change costs: keep build/bench.json of before as before.json, then
# make bench BENCH="--compare before.json"; BENCH=--short takes three minutes.
bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks --json build/bench.json $(BENCH)

clean:
	rm -rf $(VENV) demo build dist
