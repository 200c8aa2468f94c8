"""Fits that do not fit into memory at once, and what sums and solves take."""

import pytest
import torch

from benchmarks.memory import LiveTensors
from hf_kvtransfer import CalibrationError, KVGeometry, fit_mapper
from hf_kvtransfer.fitting import memory
from hf_kvtransfer.fitting.costs import MapPlan
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
ALONE = 1.3e6


def test_groups_of_layers_are_solved_from_captured_states(pair, texts, whole, tmp_path):
    mapper = fit_mapper(*pair, texts, checkpoint=tmp_path, memory=int(ALONE), **OPTIONS)
    check_same(mapper, whole)
    assert mapper.config.fit["train_tokens"] == whole.config.fit["train_tokens"]
    assert not list(tmp_path.iterdir())


def test_a_capture_goes_on_after_an_interruption_and_a_full_disk(pair, texts, whole, tmp_path, monkeypatch):
    read, reads = PairedStates.read, []

    def counted(self, batch):
        if len(reads) == limit:
            raise KeyboardInterrupt
        reads.append(batch)
        return read(self, batch)

    monkeypatch.setattr(PairedStates, "read", counted)
    limit = 14  # ten batches to choose layers on
    options = OPTIONS | {"checkpoint": tmp_path, "memory": int(ALONE)}
    with pytest.raises(KeyboardInterrupt):
        fit_mapper(*pair, texts, **options)
    (states,) = (path for path in tmp_path.iterdir() if path.is_dir())
    file = next(states.glob("*-train.states"))
    file.write_bytes(file.read_bytes() + b"half a batch")
    kept = file.rename(file.with_suffix(".moved"))
    file.symlink_to("/dev/full")
    reads.clear()
    with pytest.raises(CalibrationError, match=r"cannot be written .* after \d+ tokens .*No space left.* kB a token"):
        fit_mapper(*pair, texts, **options)
    file.unlink()
    kept.rename(file)
    reads.clear()
    check_same(fit_mapper(*pair, texts, **options), whole)
    assert 6 <= len(reads) <= 7  # of ten


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
    with pytest.raises(CalibrationError, match="does not have. Pass `memory`, at least"):
        fit_mapper(*pair, texts, **OPTIONS)


def test_memory_that_runs_out_is_told_of(pair, texts, monkeypatch):
    def exhausted(self, batch):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(PairedStates, "read", exhausted)
    with pytest.raises(CalibrationError, match="Memory ran out in a batch of 4 texts .* Lower `batch_size`"):
        fit_mapper(*pair, texts, **OPTIONS)


@pytest.mark.parametrize("kind", ["linear", "low_rank", "residual_mlp", "head_matched"])
def test_sums_and_solves_take_what_is_said(kind):
    """Eight layers of eight heads and embeddings, at an eighth of their width, from random sums."""
    source, target = KVGeometry((LayerGeometry(8, 16, 16),) * 8), KVGeometry((LayerGeometry(8, 16, 16),))
    plan = MapPlan(kind, source, target, 640)
    selection = {0: list(range(8))}
    sums = LayerSums(plan, selection, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for held_out in (False, True):
        rows = {name: torch.randn(400, 640 if name == "tokens" else 256, generator=generator) for name in sums.blocks}
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
        selection = {0: list(range(8))}
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
