VENV ?= .venv
PYTHON ?= python3
RUN = $(VENV)/bin/python

# Two torch processes that share cores stall each other when their idle threads spin.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test quality style clean

demo: $(VENV)/installed
	$(RUN) examples/quickstart.py

test: quality
	$(RUN) -m pytest -q

quality: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

style: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
