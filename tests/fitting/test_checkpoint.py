"""A fit that was interrupted goes on, and ends as if it had not been."""

import pytest
import torch

from hf_kvtransfer import CalibrationError, fit_mapper
from hf_kvtransfer.fitting import checkpoint
from hf_kvtransfer.fitting.states import PairedStates

from ..tiny_models import plant, random_ids, tiny_model


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama")
    return source, plant(source)


@pytest.fixture(scope="module")
def texts(pair):
    return random_ids(pair[0], 40, 60, seed=1).tolist()


@pytest.fixture
def reads(monkeypatch):
    """How many batches were read; more than `limit` are an interruption."""
    read = PairedStates.read
    state = {"count": 0, "limit": 10**6}

    def counted(self, batch):
        if state["count"] == state["limit"]:
            raise KeyboardInterrupt
        state["count"] += 1
        return read(self, batch)

    monkeypatch.setattr(PairedStates, "read", counted)
    monkeypatch.setattr(checkpoint, "WRITE_SHARE", float("inf"))  # after each batch
    return state


# Ten batches are read to choose layers on, and ten for the sums, of which the last is held out.
OPTIONS = {"num_source_layers": 1, "batch_size": 4, "screening_tokens": 10**6, "held_out_every": 5}


def interrupt(pair, texts, reads, folder, after, **options):
    reads |= {"count": 0, "limit": after}
    with pytest.raises(KeyboardInterrupt):
        fit_mapper(*pair, texts, checkpoint=folder, **OPTIONS, **options)
    reads |= {"count": 0, "limit": 10**6}


@pytest.mark.parametrize("kind", ["linear", "identity"])
def test_goes_on_where_it_was(pair, texts, reads, tmp_path, kind):
    options = {"kind": kind} | OPTIONS
    if kind == "identity":
        options = {name: value for name, value in options.items() if name != "num_source_layers"}
    whole = fit_mapper(*pair, texts, **options)
    num_reads = reads["count"]
    for after in (5, num_reads // 2 + 1, num_reads - 1):
        folder = tmp_path / str(after)
        reads |= {"count": 0, "limit": after}
        with pytest.raises(KeyboardInterrupt):
            fit_mapper(*pair, iter(texts), checkpoint=folder, **options)
        reads |= {"count": 0, "limit": 10**6}
        resumed = fit_mapper(*pair, iter(texts), checkpoint=folder, **options)
        assert num_reads - after <= reads["count"] <= num_reads - after + 1
        assert resumed.config.to_dict() == whole.config.to_dict()
        assert resumed.digest() == whole.digest()
        assert not list(folder.iterdir())


def test_another_fit_is_refused(pair, texts, reads, tmp_path):
    interrupt(pair, texts, reads, tmp_path, 15)
    other_target = plant(pair[0], seed=2)
    for models, given, options, message in (
        (pair, texts, {"seed": 1}, "seed was 0 and is 1"),
        ((pair[0], other_target), texts, {}, "target.weights"),
        (pair, texts[:12] + texts[11:], {}, "batches of other texts"),
        (pair, texts[:12], {}, "batches of other texts"),
    ):
        with pytest.raises(CalibrationError, match=message):
            fit_mapper(*models, given, checkpoint=tmp_path, **OPTIONS, **options)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CalibrationError, match="is damaged.*Delete it"):
        fit_mapper(*pair, texts, checkpoint=tmp_path, **OPTIONS)


def test_an_interrupted_write_leaves_the_file_before_it(pair, texts, reads, tmp_path, monkeypatch):
    save_file, written = checkpoint.save_file, []

    def interrupted(tensors, path, **options):
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save_file(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_mapper(*pair, texts, checkpoint=tmp_path, **OPTIONS)
    reads["count"] = 0
    resumed = fit_mapper(*pair, texts, checkpoint=tmp_path, **OPTIONS)
    assert torch.equal(resumed.layers[1].weight, fit_mapper(*pair, texts, **OPTIONS).layers[1].weight)
