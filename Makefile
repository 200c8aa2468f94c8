VENV ?= .venv
PYTHON ?= python3
RUN = $(VENV)/bin/python

# Two torch processes that share cores stall each other when their idle threads spin.
export OMP_WAIT_POLICY ?= passive

# transformers_torch: the floors, the first transformers whose `prefill_chunk_size` can be used, and what is newest.
MATRIX ?= 5.18_2.9 5.22_2.9 newest_newest
MATRIX_TESTS ?= tests

# Files of tests in processes of their own, each on one core: tiny models gain nothing from a second one. In the order
# of collection: what takes longest is first there.
WORKERS ?= 2
PYTEST = -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-matrix generation-table docs quality style clean

demo: $(VENV)/installed
	$(RUN) examples/quickstart.py

test test-matrix: export OMP_NUM_THREADS ?= 1
test: quality
	$(RUN) $(PYTEST)

# In each environment pip installs what these versions allow, not what constraints.txt pins.
test-matrix: $(addprefix matrix-,$(MATRIX))

matrix-%: .venv-matrix/%/installed
	.venv-matrix/$*/bin/python $(PYTEST) $(MATRIX_TESTS)

.PRECIOUS: .venv-matrix/%/installed
.venv-matrix/%/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade --editable '.[gguf,dev]' \
		$(call release,transformers,$(word 1,$(subst _, ,$*))) $(call release,torch,$(word 2,$(subst _, ,$*)))
	touch $@

release = '$(1)$(if $(filter-out newest,$(2)),==$(2).*)'

generation-table: $(VENV)/installed
	$(RUN) -m pytest -q tests/generation --deselect tests/generation/test_table.py --write-table docs/generation.md

docs: $(VENV)/installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

quality: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

style: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[gguf,dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-matrix build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
