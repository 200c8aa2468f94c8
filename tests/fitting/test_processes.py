"""A fit that is shared by two processes, as `accelerate launch` starts them."""

import json
import multiprocessing
import os

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import PrepareForLaunch
from torch.multiprocessing import start_processes

from hf_kvtransfer import CalibrationError, KVMapper, fit_mapper
from hf_kvtransfer.fitting import checkpoint
from hf_kvtransfer.fitting.states import PairedStates

from ..tiny_models import plant, random_ids, tiny_model


# Twelve batches, of which the last is held out: one of the processes reads none that is.
OPTIONS = {
    "num_source_layers": 1,
    "batch_size": 4,
    "screening_tokens": 10**6,
    "held_out_every": 12,
    "moment_dtype": torch.float64,
    "dtype": torch.float32,
}


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama")
    return source, plant(source)


@pytest.fixture(scope="module")
def texts(pair):
    return random_ids(pair[0], 48, 60, seed=1).tolist()


def launch(folder, function, *args):
    """
    Run a function in two processes, each with its own number as first argument: as accelerate's `debug_launcher`, but
    forked from one that has imported everything and has no threads yet, which may hold locks.
    """
    multiprocessing.set_forkserver_preload([__name__])
    meeting = folder / f"meeting-{len(list(folder.iterdir()))}"
    start_processes(_in_process, (str(meeting), function, args), nprocs=2, start_method="forkserver")


def _in_process(rank, meeting, function, args):
    torch.set_num_threads(1)
    os.environ |= {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_DEBUG_RDV_FILE": meeting,
        "ACCELERATE_USE_CPU": "yes",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    PrepareForLaunch(function, debug=True)(rank, rank, *args)


def fit_and_save(rank, pair, texts, folders):
    """A fit for each folder, with its options."""
    for folder, options in folders.items():
        _fit_and_save(rank, pair, texts, folder, options)


def _fit_and_save(rank, pair, texts, folder, options):
    read, reads = PairedStates.read, []

    def counted(self, batch):
        reads.append(len(batch))
        return read(self, batch)

    PairedStates.read = counted
    mapper = fit_mapper(*pair, texts, **options)
    PairedStates.read = read
    folder.mkdir(exist_ok=True)
    (folder / f"{rank}.json").write_text(json.dumps([len(reads), mapper.digest(), mapper.config.to_dict()]))
    if rank == 0:
        mapper.save_pretrained(folder)


def check_same(mapper, folder, num_reads):
    reads, digests, configs = zip(
        *(json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)), strict=True
    )
    assert sum(reads) == num_reads
    assert digests[0] == digests[1]
    assert configs[0] == configs[1]
    found = KVMapper.from_pretrained(folder)
    assert found.config.layers == mapper.config.layers
    fit, expected = found.config.fit, mapper.config.fit
    for name in ("num_texts", "train_tokens", "held_out_tokens"):
        assert fit[name] == expected[name]
    for i, layer in enumerate(expected["layers"]):
        assert fit["layers"][i]["explained_variance"] == pytest.approx(layer["explained_variance"], abs=1e-6)
        assert fit["layers"][i].get("ridge_strengths") == layer.get("ridge_strengths")
    for own, other in zip(found.parameters(), mapper.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_two_processes_fit_what_one_does(pair, texts, tmp_path):
    kinds = {
        "linear": {},
        "head_matched": {"kind": "head_matched", "storage_bits": 8},
        "identity": {"kind": "identity", "rank": 2, "num_source_layers": None},
    }
    folders = {
        tmp_path / kind: {name: value for name, value in (OPTIONS | options).items() if value is not None}
        for kind, options in kinds.items()
    }
    launch(tmp_path, fit_and_save, pair, texts, folders)
    for folder, options in folders.items():
        check_same(fit_mapper(*pair, texts, **options), folder, 24)


def die_or_tell(rank, pair, texts, folder, keeping, limit):
    """The second process ends without a word at its third batch of the sums; the first tells what it sees."""
    read, reads = PairedStates.read, []

    def counted(self, batch):
        if rank == 1 and len(reads) == limit:
            os._exit(0)
        reads.append(batch)
        return read(self, batch)

    PairedStates.read = counted
    checkpoint.WRITE_SHARE = float("inf")  # after each batch
    try:
        fit_mapper(*pair, texts, checkpoint=keeping, **OPTIONS)
    except CalibrationError as error:
        (folder / "error").write_text(str(error))


def test_a_process_that_dies_is_told_of_and_its_sums_are_kept(pair, texts, tmp_path):
    keeping = tmp_path / "keeping"
    launch(tmp_path, die_or_tell, pair, texts, tmp_path, keeping, 6 + 2)
    assert "Process 0 of 2 cannot reach the others" in (tmp_path / "error").read_text()
    with pytest.raises(CalibrationError, match="processes was 2 and is 1"):
        fit_mapper(*pair, texts, checkpoint=keeping, **OPTIONS)
    launch(tmp_path, fit_and_save, pair, texts, {tmp_path / "resumed": OPTIONS | {"checkpoint": keeping}})
    # The first process had read everything, the second two of its six batches.
    check_same(fit_mapper(*pair, texts, **OPTIONS), tmp_path / "resumed", 4)
    assert not list(keeping.iterdir())


def test_a_launch_that_accelerate_does_not_see_is_told_of(pair, texts, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(PartialState, "_shared_state", {})
    PartialState()
    with pytest.raises(CalibrationError, match="one of 2 processes, but accelerate was set up for one alone"):
        fit_mapper(*pair, texts, **OPTIONS)


def tell(rank, pair, texts, folder):
    try:
        fit_mapper(*pair, texts[24 * rank : 24 * (rank + 1)], **OPTIONS)
    except CalibrationError as error:
        (folder / f"error-{rank}").write_text(str(error))


def test_each_process_must_be_given_all_texts(pair, texts, tmp_path):
    launch(tmp_path, tell, pair, texts, tmp_path)
    for rank in range(2):
        assert "2 processes of this fit were given different texts" in (tmp_path / f"error-{rank}").read_text()
