# Everything sets itself up: `make serve` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
SOURCES := $(shell find cluster deploy kernels worker -name '*.py' -o -path 'deploy/demo_model/*' -type f)
# Ray listens on every interface, whatever it is told: where the kernel allows it, tests run in a
# network namespace of their own with nothing but loopback.
ISOLATE := $(shell unshare -n --pid --fork --mount-proc true 2>/dev/null && command -v ip >/dev/null \
	&& echo "unshare -n --pid --fork --mount-proc sh -c 'ip link set lo up && exec \"\$$0\" \"\$$@\"'")
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(TEST_ENV) $(ISOLATE) $(abspath $(BIN))/python -m pytest

.PHONY: serve test test-fast test-slow check format bench chart helm wheel clean

## Serve the bundled demo model over two CPU ranks. ARGS adds flags.
serve: $(VENV)/.package
	$(BIN)/plait serve --tensor-parallel-size 2 $(ARGS)

## Every test but the slow ones, against the built wheel.
test: $(VENV)/.dev $(VENV)/.wheel helm
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

## The tests that need neither Ray nor minutes.
test-fast: $(VENV)/.dev $(VENV)/.wheel
	$(PYTEST) -m "not slow and not gpu and not ray" --ignore tests/conformance $(ARGS)

test-slow: $(VENV)/.dev $(VENV)/.wheel
	$(PYTEST) -m slow $(ARGS)

## Format, lint, types, import arrows.
check: $(VENV)/.dev .typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.typing $(BIN)/mypy
	PYTHONPATH=.typing $(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

## Plait beside its peers and the limits of this machine; ARGS=--help lists the options.
bench: $(VENV)/.dev $(VENV)/.wheel tests/bench/requirements.txt
	$(PIP) install -q -r tests/bench/requirements.txt
	$(TEST_ENV) $(BIN)/python tests/bench/run.py $(ARGS)

## Lint, render and validate the chart with Helm 4 and Helm 3; check the alert rules.
chart: $(VENV)/.dev $(VENV)/.wheel helm
	$(PYTEST) tests/packaging/chart $(ARGS)

helm: $(VENV)/.dev
	$(BIN)/python tests/packaging/chart/fetch_helm.py

wheel: $(VENV)/.wheel

clean:
	rm -rf $(VENV) .typing build dist .cache

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q "$(TORCH)"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		print(*p['dependencies'], *p['optional-dependencies']['dev'], sep='\n')" > $(VENV)/requirements.txt
	$(PIP) install -q -r $(VENV)/requirements.txt
	touch $@

# The package alone, for serving.
$(VENV)/.package: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(PIP) install -q .
	rm -f $(VENV)/.wheel
	touch $@

# The package out of its wheel, for tests: an editable install would hide what the wheel lacks.
$(VENV)/.wheel: $(VENV)/.dev $(SOURCES)
	rm -rf dist build
	$(BIN)/python -m build -q --wheel
	$(PIP) install -q --no-deps --force-reinstall dist/plait-*.whl
	touch $@

# Links by which type checkers see the folders under their package names.
.typing:
	mkdir -p .typing/plait
	for folder in cluster deploy kernels worker; do ln -sfn ../../$$folder .typing/plait/$$folder; done
