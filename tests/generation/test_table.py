from pathlib import Path

from .table import expected_cells, listed_cells


def test_the_written_table_has_every_cell():
    text = (Path(__file__).parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
    assert listed_cells(text) == expected_cells(), "run `make generation-table`"
