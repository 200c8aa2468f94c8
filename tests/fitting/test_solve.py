"""Closed forms against the definition of what they minimise."""

import torch

from hf_kvtransfer import KVGeometry
from hf_kvtransfer.fitting.reduced_rank import reduce_rank
from hf_kvtransfer.fitting.ridge import Gaussian
from hf_kvtransfer.fitting.solve import LayerProblem, affine_part, solve_layer
from hf_kvtransfer.fitting.symmetric import SymmetricBlocks
from hf_kvtransfer.geometry import LayerGeometry
from hf_kvtransfer.maps import build_layer_map


def test_no_other_map_of_the_rank_is_better():
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weight, mixing = noise(300, 8) @ noise(8, 8), noise(8, 5), noise(5, 5)
    cov, metric = x.T @ x / 300, mixing @ mixing.T

    def error(low):
        missed = x @ (weight - low)
        return ((missed @ metric) * missed).sum()

    down, up = reduce_rank(weight, SymmetricBlocks.of(cov), 2, metric)
    best = error(down.T @ up.T)
    assert torch.linalg.matrix_rank(down.T @ up.T) == 2
    # Around the optimum, and from anywhere else downhill, there is nothing better.
    assert all(error((down + 1e-3 * noise(2, 8)).T @ (up + 1e-3 * noise(5, 2)).T) >= best for _ in range(50))
    values = torch.linalg.svdvals(x @ weight @ torch.linalg.cholesky(metric))
    torch.testing.assert_close(best, values[2:].square().sum())
    full = reduce_rank(weight, SymmetricBlocks.of(cov), 5, metric)
    torch.testing.assert_close(full[0].T @ full[1].T, weight)


def test_directions_that_cost_nothing_are_left_to_the_mean():
    weight = torch.eye(3, dtype=torch.float64)
    metric = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64).diag()
    down, up = reduce_rank(weight, SymmetricBlocks.of(weight), 2, metric)
    torch.testing.assert_close(down.T @ up.T, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).diag())


def test_heads_are_matched_in_each_layer():
    """Two target heads, of which each copies one of three heads in one of two layers with other head widths."""
    generator = torch.Generator().manual_seed(1)
    source = (LayerGeometry(3, 4, 2), LayerGeometry(2, 3, 3))
    target = LayerGeometry(2, 2, 2)
    x = torch.randn(500, 18 + 12 + 5, generator=generator, dtype=torch.float64) + 1
    first_keys, first_values, second_keys, second_values, tokens = x.split([12, 6, 6, 6, 5], 1)
    keys = torch.cat([first_keys[:, 8:10], second_keys[:, 0:2] + tokens[:, :2]], 1)
    values = torch.cat([second_values[:, 3:5], first_values[:, 2:4]], 1)
    y = torch.cat([keys, values], 1)
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    moments = Gaussian(
        x.mean(0),
        y.mean(0),
        SymmetricBlocks.of(centred_x.T @ centred_x / 500),
        centred_x.T @ centred_y / 500,
        y.var(0, correction=0),
    )
    spec = {"kind": "head_matched", "source_layers": [0, 1], "source_heads": [[0, 0], [0, 0]]}
    solution = solve_layer(spec, LayerProblem(moments, moments, source, target), [1e-8])
    assert solution.spec["source_heads"] == [[2, 1], [1, 0]]
    layer_map = build_layer_map(solution.spec, 0, KVGeometry(source), KVGeometry((target,)), 5).double()
    layer_map.load_state_dict(solution.tensors)
    weight, bias = affine_part(layer_map, [18, 12], 5)
    torch.testing.assert_close(x @ weight + bias, y, rtol=1e-5, atol=1e-5)
