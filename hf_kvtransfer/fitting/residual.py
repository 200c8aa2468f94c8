"""`train_residuals`: the MLPs of a mapper learn what its linear maps leave over."""

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..compat import input_device
from ..errors import CalibrationError
from ..mapper import KVMapper
from ..maps.linear import LinearMap
from ..maps.residual_mlp import ResidualMLPMap
from .arguments import check_numbers
from .states import TOKENS, PairedStates, token_blocks
from .text import calibration_texts


# Rows of a step. A batch of texts has some thousand, in random order.
_ROWS = 1024


def train_residuals(
    mapper: KVMapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Path | Mapping | Iterable,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    passes: int = 2,
    batch_size: int = 8,
    max_length: int = 1024,
    held_out_every: int = 10,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> KVMapper:
    """
    Train the MLPs of `"residual_mlp"` maps on what the maps' linear parts leave over of keys and values.

    Keys and values count by the share of their variance, and linear parts stay as they are. Each layer keeps the MLP
    that did best on held-out text; where none explains more than the linear part alone, the MLP is dropped, and the
    layer's map is of kind `"linear"` from then on. [`distill_mapper`] can train what is kept further.

    Args:
        mapper ([`KVMapper`]):
            As `fit_mapper(kind="residual_mlp")` made it. It is not changed.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models.
        texts (`str`, `Path`, `Mapping` or `Iterable`):
            As in [`fit_mapper`], best those it was fitted on, and of an end.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The models' tokenizers. One is enough if they share it.
        passes (`int`, *optional*, defaults to 2):
            Passes over the rows of a batch of texts, which are there once both models have read it.
        batch_size (`int`, *optional*, defaults to 8), max_length (`int`, *optional*, defaults to 1024):
            Texts read at once, and target tokens to which each is cut.
        held_out_every (`int`, *optional*, defaults to 10):
            Each how-manieth text is held out. A batch of them, at even distances, decides.
        learning_rate (`float`, *optional*, defaults to 1e-3):
            Of Adam, falling to zero with the texts.
        seed (`int`, *optional*, defaults to 0):
            Of the order of texts and rows.

    Returns:
        [`KVMapper`]: In `mapper`'s dtype, with no evidence yet. Its config's `fit["residual_mlp"]` holds the settings,
        and for each layer the held-out share of variance that its linear part leaves over and that is left with the
        MLP, `[before, after]`, the same where the MLP was dropped; `None` for other kinds.

    Raises:
        `CalibrationError`: no text is held out, or states are not finite.
        `ValueError`: the mapper has no such map, is quantised, or a number is not positive.
    """
    settings = {
        "passes": passes,
        "batch_size": batch_size,
        "max_length": max_length,
        "held_out_every": held_out_every,
        "learning_rate": learning_rate,
    }
    check_numbers(**settings)
    if mapper.config.storage is not None:
        raise ValueError(f"Mapper {mapper.name} is quantised: train the mapper as it was fitted, then `quantize` it.")
    dtype = mapper.dtype
    mapper = (
        mapper.dequantize(torch.promote_types(dtype, torch.float32)).to(input_device(target)).requires_grad_(False)
    )
    layers = {i: _Layer(i, part, mapper) for i, part in enumerate(mapper.layers) if isinstance(part, ResidualMLPMap)}
    if not layers:
        raise ValueError(f"Mapper {mapper.name} has no map of kind 'residual_mlp': fit it with that kind.")
    source_tokenizer, target_tokenizer = source_tokenizer or target_tokenizer, target_tokenizer or source_tokenizer
    states = PairedStates(
        source,
        target,
        source_tokenizer,
        target_tokenizer,
        bool(mapper.config.token_features),
        mapper.config.sink_tokens,
        max_length,
        mapper.config.native_layers,
        mapper.config.previous_tokens,
    )
    whole = states.whole(calibration_texts(texts, target_tokenizer, seed))
    batches = list(states.batches(whole, batch_size, held_out_every))
    held_out = [text for is_held_out, batch in batches if is_held_out for text in batch]
    train = [batch for is_held_out, batch in batches if not is_held_out]
    if not held_out or not train:
        raise CalibrationError(
            f"The `texts` are fewer than `held_out_every={held_out_every}`, none is held out: give more, or lower it."
        )
    # Of all lengths, by which batches are sorted.
    count = min(batch_size, len(held_out))
    watched = states.read([held_out[i * len(held_out) // count] for i in range(count)])
    random.Random(seed).shuffle(train)
    for layer in layers.values():
        layer.look(watched)

    optimizer = torch.optim.Adam([p for layer in layers.values() for p in layer.parameters], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=max(1, len(train)))
    generator = torch.Generator().manual_seed(seed)
    num_rows = 0
    for batch in logging.tqdm(train, desc="Training residuals"):
        rows = states.read(batch)
        for part in _parts(rows, passes, generator):
            for layer in layers.values():
                layer.loss(part).backward()
            optimizer.step()
            optimizer.zero_grad()
        num_rows += len(next(iter(rows.values())))
        schedule.step()
        for layer in layers.values():
            layer.look(watched)

    config = copy.deepcopy(mapper.config)
    reports: list[list[float] | None] = [None] * len(config.layers)
    for i, layer in layers.items():
        reports[i] = [layer.before, layer.best]
        mapper.layers[i] = layer.finish()
        if not isinstance(mapper.layers[i], ResidualMLPMap):
            config.layers[i] = {"kind": "linear"} | {
                name: value for name, value in config.layers[i].items() if name not in ("kind", "hidden_size")
            }
    config.fit = (config.fit or {}) | {
        "residual_mlp": settings | {"seed": seed, "train_tokens": num_rows, "layers": reports}
    }
    mapper.config = config
    return (mapper if mapper.dtype == dtype else mapper.to(dtype)).eval().requires_grad_(False)


class _Layer:
    """A map in training, and the best of its MLP so far."""

    def __init__(self, layer_idx: int, layer_map: ResidualMLPMap, mapper: KVMapper):
        self.layer_idx, self.layer_map = layer_idx, layer_map
        self.widths = mapper.target_geometry.layers[layer_idx].widths
        self.parameters = [layer_map.down, layer_map.down_bias, layer_map.up]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.before = self.best = float("inf")
        # None yet is better than the linear part alone, unless the MLP was trained before.
        self._best = [p.detach().clone() for p in self.parameters] if layer_map.up.any() else None

    def loss(self, rows: Mapping) -> torch.Tensor:
        """What is left of the variance of keys and of values, mean of the two."""
        features = [rows["source", j].float()[None] for j in self.layer_map.source_layers]
        tokens = None
        if TOKENS in rows:
            names = token_blocks(self.layer_map.previous_tokens)
            tokens = torch.cat([rows[name].float() for name in names], -1)[None]
        targets = rows["target", self.layer_idx].float()
        with torch.no_grad():
            left = targets - LinearMap.forward(self.layer_map, features, tokens)[0]
        error = left - self.layer_map.residual(features, tokens)[0]
        shares = [
            part.square().sum() / (own - own.mean(0)).square().sum().clamp(min=1e-30)
            for part, own in zip(error.split(self.widths, 1), targets.split(self.widths, 1), strict=True)
        ]
        return sum(shares) / len(shares)

    @torch.no_grad()
    def look(self, rows: Mapping) -> None:
        left = self.loss(rows).item()
        if self.before == float("inf"):
            self.before = self.best = left
        elif left < self.best:
            self.best, self._best = left, [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def finish(self) -> nn.Module:
        """The map with its best MLP, or without one."""
        if self._best is not None:
            for parameter, best in zip(self.parameters, self._best, strict=True):
                parameter.copy_(best)
            return self.layer_map
        own = self.layer_map
        out_features, in_features = own.weight.shape
        plain = LinearMap(own.source_layers, in_features, out_features, own.previous_tokens)
        plain.weight, plain.bias = self.layer_map.weight, self.layer_map.bias
        return plain


def _parts(rows: Mapping, passes: int, generator: torch.Generator) -> Iterator[dict]:
    """Random parts of some rows, each row once in a pass."""
    num_rows = len(next(iter(rows.values())))
    for _ in range(passes):
        for index in torch.randperm(num_rows, generator=generator).chunk(-(-num_rows // _ROWS)):  # of equal size
            yield {name: block[index.to(block.device)] for name, block in rows.items()}
