import builtins

import pytest

from hf_kvtransfer import KVMapperConfig, fit_mapper
from hf_kvtransfer.fitting.plot import plot_selection

from ..tiny_models import identity_mapper, plant, random_ids, tiny_model


@pytest.fixture(scope="module")
def config():
    source = tiny_model("llama")
    texts = list(random_ids(source, 24, 60))
    return fit_mapper(source, plant(source), texts, num_source_layers=1, previous_tokens=2).config


def test_cells_are_what_is_read(config):
    pytest.importorskip("matplotlib")
    figure = plot_selection(config)
    cells, errors, sizes = figure.axes
    read = cells.images[0].get_array()
    assert read.shape == (4, 4)
    for i, spec in enumerate(config.layers[1:], start=1):
        assert [j for j in range(4) if read[i, j] == 1] == spec["source_layers"]
    assert set(read[0]) == {0.35}
    assert [label.get_text() for label in cells.get_yticklabels()] == ["0", "+2   1", "+2   2", "+2   3"]
    assert [bar.get_width() for bar in sizes.patches] == [layer["bytes"] / 1e6 for layer in config.fit["layers"]]
    assert len(errors.patches) == 8
    figure.canvas.draw()


def test_without_matplotlib(config, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_selection(config)


def test_a_mapper_that_was_not_fitted():
    pytest.importorskip("matplotlib")
    config = KVMapperConfig(**identity_mapper(tiny_model("llama")).config.to_dict())
    with pytest.raises(ValueError, match="fit it with `fit_mapper`"):
        plot_selection(config)
