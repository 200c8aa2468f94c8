"""Fits that do not fit into memory at once, and what sums and solves take."""

import resource

import pytest
import torch

from benchmarks.memory import LiveTensors
from hf_kvtransfer import CalibrationError, KVGeometry, fit_mapper
from hf_kvtransfer.fitting import checkpoint, memory, solve
from hf_kvtransfer.fitting.costs import MapPlan
from hf_kvtransfer.fitting.inputs import Inputs
from hf_kvtransfer.fitting.layer_fit import fit_layers
from hf_kvtransfer.fitting.processes import Processes
from hf_kvtransfer.fitting.stages import LayerSums
from hf_kvtransfer.fitting.states import PairedStates
from hf_kvtransfer.fitting.symmetric import SymmetricBlocks
from hf_kvtransfer.geometry import LayerGeometry

from ..tiny_models import plant, random_ids, tiny_model


OPTIONS = {"num_source_layers": 2, "batch_size": 4, "moment_dtype": torch.float64, "dtype": torch.float32}


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama")
    return source, plant(source)


@pytest.fixture(scope="module")
def texts(pair):
    return random_ids(pair[0], 40, 60, seed=1).tolist()


@pytest.fixture(scope="module")
def whole(pair, texts):
    return fit_mapper(*pair, texts, **OPTIONS)


def check_same(mapper, whole):
    assert mapper.config.layers == whole.config.layers
    for own, other in zip(mapper.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


# Of one target layer of the tiny pair: the most that any of them takes.
ALONE = 1.6e6


def test_groups_of_layers_are_solved_from_captured_states(pair, texts, whole, tmp_path):
    mapper = fit_mapper(*pair, texts, checkpoint=tmp_path, memory=int(ALONE), **OPTIONS)
    check_same(mapper, whole)
    assert mapper.config.fit["train_tokens"] == whole.config.fit["train_tokens"]
    assert not list(tmp_path.iterdir())


def test_a_capture_goes_on_after_the_disk_was_full(pair, texts, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WRITE_SHARE", float("inf"))  # after each batch
    read, reads, limits = PairedStates.read, [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def counted(self, batch):
        reads.append(batch)
        if len(reads) == 14:  # ten batches to choose layers on
            size = max(file.stat().st_size for file in tmp_path.glob("*/*-train.states"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, limits[1]))
        return read(self, batch)

    monkeypatch.setattr(PairedStates, "read", counted)
    options = OPTIONS | {"checkpoint": tmp_path, "memory": int(ALONE)}
    try:
        with pytest.raises(CalibrationError, match=r"cannot be written to .* after 6\d\d tokens .* kB a token"):
            fit_mapper(*pair, texts, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reads.clear()
    check_same(fit_mapper(*pair, texts, **options), whole)
    assert len(reads) == 10 - 3


def test_too_little_memory_is_told_before_text_is_read(pair, texts, tmp_path, monkeypatch):
    with pytest.raises(CalibrationError, match=r"`memory` is 0\.0 GB, but target layer \d takes .* even alone"):
        fit_mapper(*pair, texts, checkpoint=tmp_path, memory="100kB", **OPTIONS)
    for options, message in (
        ({"memory": "16GB"}, "`memory='16GB'` needs `checkpoint`"),
        ({"memory": "much", "checkpoint": tmp_path}, "`memory` must be a positive number of bytes, .* got 'much'"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_mapper(*pair, texts, **options)
    monkeypatch.setattr(memory, "_installed", lambda: 2e6)
    with pytest.raises(CalibrationError, match="does not have. Pass `memory`, '"):
        fit_mapper(*pair, texts, **OPTIONS)


def test_memory_that_runs_out_is_told_of(pair, texts, monkeypatch):
    def exhausted(self, batch):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(PairedStates, "read", exhausted)
    with pytest.raises(CalibrationError, match="Memory ran out in a batch of 4 texts .* Lower `batch_size`"):
        fit_mapper(*pair, texts, **OPTIONS)


@pytest.mark.parametrize("previous_tokens", [0, 2])
@pytest.mark.parametrize("kind", ["linear", "low_rank", "residual_mlp", "head_matched"])
def test_sums_and_solves_take_what_is_said(kind, previous_tokens, monkeypatch):
    """Eight source layers and embeddings, at a thirtieth of their width, from random sums."""
    monkeypatch.setattr(solve, "_ROWS", solve._ROWS // 32)
    source, target = KVGeometry((LayerGeometry(2, 16, 16),) * 8), KVGeometry((LayerGeometry(2, 16, 16),))
    plan = MapPlan(kind, source, target, 160, hidden_size=8 if kind == "residual_mlp" else None)
    selection = {0: Inputs(range(8), previous_tokens)}
    sums = LayerSums(plan, selection, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for held_out in (False, True):
        widths = {name: 160 if "tokens" in name else 64 for name in sums.blocks}
        rows = {name: torch.randn(400, width, generator=generator) for name, width in widths.items()}
        sums.add(rows, held_out)
    products = [
        tensor for part in sums.sums.values() for name, tensor in part.state().items() if name.startswith("product")
    ]
    assert sum(tensor.nbytes for tensor in products) == memory.sum_bytes(plan, selection)
    with LiveTensors() as live, torch.no_grad():
        fit_layers(plan, sums, {}, [1e-1, 1e-2], 0, Processes())
    allowed = memory.solve_bytes(plan, 0, selection[0])
    assert 0.6 * allowed < live.peak <= allowed


@pytest.mark.parametrize("hidden_size", [5120, 8192])
def test_wide_models_stay_in_16_gigabytes(hidden_size):
    geometry = KVGeometry((LayerGeometry(8, 128, 128),) * 8)
    for kind in ("linear", "low_rank", "residual_mlp"):
        plan = MapPlan(kind, geometry, geometry, hidden_size)
        selection = {0: Inputs(range(8))}
        assert memory.sum_bytes(plan, selection) + memory.solve_bytes(plan, 0, selection[0]) < 16e9


def test_a_matrix_in_blocks_is_the_matrix():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 12, generator=generator, dtype=torch.float64)
    matrix, scale = rows.T @ rows / 50, torch.rand(12, generator=generator, dtype=torch.float64) + 0.5
    widths = [5, 1, 6]
    starts = [0, 5, 6]

    def block(i, j):
        return matrix[starts[i] : starts[i] + widths[i], starts[j] : starts[j] + widths[j]].clone()

    blocks = SymmetricBlocks(widths, block)
    right = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(blocks.dense(), matrix)
    torch.testing.assert_close(blocks.diagonal(), matrix.diagonal())
    torch.testing.assert_close(torch.cat([product for _, product in blocks.times(right)]), matrix @ right)
    index = torch.tensor([7, 0, 11, 5])
    torch.testing.assert_close(blocks.select(index).dense(), matrix[index][:, index])
    scaled = matrix / scale / scale[:, None] + 0.1 * torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(blocks.cholesky(scale, 0.1).solve(right), torch.linalg.solve(scaled, right))
    assert blocks.cholesky(scale, -5.0) is None
