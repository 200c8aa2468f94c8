"""`calibrate_readout`: value maps solved for what the target's attention reads out of them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..compat import input_device
from ..errors import CalibrationError
from ..geometry import LayerGeometry
from ..mapper import KVMapper
from .arguments import check_numbers
from .continuations import Continuations
from .group_readouts import GroupReadouts
from .long_texts import long_texts
from .readout_sums import Correction, value_heads
from .states import PairedStates
from .text import calibration_texts
from .written_out_attention import WrittenOutAttention


# Relative to the mean square of a smoothed feature. No change at all is a candidate too.
READOUT_STRENGTHS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


def calibrate_readout(
    mapper: KVMapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Path | Mapping | Iterable,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int = 1024,
    continuation_length: int = 64,
    continuations: int = 4,
    passes: int = 3,
    held_out_every: int = 10,
    ridge_strengths: Sequence[float] = READOUT_STRENGTHS,
    seed: int = 0,
) -> KVMapper:
    """
    Solve the value maps of a mapper again, for what the target's attention reads out of mapped values with weights on
    mapped keys, instead of for the values themselves. Nothing is added to the mapper.

    The target continues texts on translations of what stands before; its readouts there should be those on its own
    cache. With the keys' maps fixed, so are the attention weights, and the readout is linear in the values' maps:
    ridge regression on smoothed rows, towards the maps as they are, solved for each KV head with all of its query
    heads together. Kinds `"linear"`, `"head_matched"` and the linear part of `"residual_mlp"` are calibrated, other
    layers stay as they are.

    A layer's queries depend on what the layers before it have read out. The layers are therefore calibrated in
    `passes` groups from the first to the last, each on top of the corrected ones before it. One pass reads all texts
    with both models and lets the target go on in each `continuations` times, up to the group's last layer; within a
    group the queries are those of layers not corrected yet. As many passes as layers follow the order to the letter.
    Memory does not grow with the text: for each KV head in a group it is two matrices of `features**2` float64
    numbers, so more passes also take less memory.

    Args:
        mapper ([`KVMapper`]):
            As fitted. It is not changed; if it is quantised, its copy is not.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models. The target's attention implementation and its output head are exchanged while this runs.
        texts (`str`, `Path`, `Mapping` or `Iterable`):
            As in [`fit_mapper`], and of an end. They are held as text, for the next pass.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The models' tokenizers. One is enough if they share it.
        max_length (`int`, *optional*, defaults to 1024):
            Target tokens to which each text is cut.
        continuation_length (`int`, *optional*, defaults to 64):
            Tokens of a continuation. What they attend to of each other is not mapped, and left out of the fit.
        continuations (`int`, *optional*, defaults to 4):
            Continuations of a text.
        passes (`int`, *optional*, defaults to 3):
            Groups of layers, and passes over the texts. 1 calibrates all layers at once.
        held_out_every (`int`, *optional*, defaults to 10):
            Each how-manieth text is held out, to choose ridge strengths on. If the mapper was fitted on them, errors
            on them are lower than on others, before and after.
        ridge_strengths (`Sequence[float]`, *optional*):
            Candidates, from the strongest down. A head is left as it is where none of them lowers its held-out error.
        seed (`int`, *optional*, defaults to 0):
            Of the places in the texts.

    Returns:
        [`KVMapper`]: In `mapper`'s dtype, with no evidence yet. Its config's `fit["readout"]` holds the settings, the
        continuations' number of tokens, and for each layer the held-out readout error before and after (squared error
        over squared native readout, with the layers of earlier passes corrected) and each KV head's ridge strength,
        `None` if it was left as it is; or why the layer was skipped.

    Raises:
        `CalibrationError`: too few texts long enough, or states that are not finite.
        `UnsupportedModelError`: the target's attention cannot be listened to.
        `ValueError`: an argument that is not positive, or a mapper without a layer of these kinds.
    """
    settings = {
        "max_length": max_length,
        "continuation_length": continuation_length,
        "continuations": continuations,
        "passes": passes,
        "held_out_every": held_out_every,
    }
    check_numbers(**settings)
    source_tokenizer, target_tokenizer = source_tokenizer or target_tokenizer, target_tokenizer or source_tokenizer
    mapper = mapper.dequantize().to(input_device(target)).eval().requires_grad_(False)
    geometry = mapper.target_geometry.layers
    layers = {i: layer for i, layer in enumerate(geometry) if layer and value_heads(mapper.layers[i], layer)}
    if not layers:
        raise ValueError(
            f"Mapper {mapper.name} has no layer of kind 'linear', 'head_matched' or 'residual_mlp': there is nothing "
            "to calibrate."
        )
    reader = Continuations(
        mapper,
        source,
        target,
        source_tokenizer,
        target_tokenizer,
        continuation_length,
        continuations,
        token_ids=[0],  # nobody reads the predictions
    )
    min_length = mapper.config.sink_tokens + 1 + continuation_length
    kept = long_texts(
        PairedStates(source, target, source_tokenizer, target_tokenizer, False, 0, max_length),
        calibration_texts(texts, target_tokenizer, seed),
        min_length,
    )
    if len(kept) < max(held_out_every, 2):
        raise CalibrationError(
            f"{len(kept)} of the `texts` have at least {min_length} tokens, room for a context and a continuation, "
            f"and each {held_out_every}th is held out: give more or longer texts, or lower `held_out_every` or "
            "`continuation_length`."
        )

    reports: list[dict[str, Any] | None] = [
        None if spec is None else {"skipped": f"kind {spec['kind']!r}"} for spec in mapper.config.layers
    ]
    num_tokens = {False: 0, True: 0}
    order, num_groups = list(layers), min(passes, len(layers))
    bounds = [len(order) * number // num_groups for number in range(num_groups + 1)]
    with (
        torch.no_grad(),
        WrittenOutAttention(target) as attention,
        logging.tqdm(desc="Calibrating readouts", unit="text", total=num_groups * len(kept)) as progress,
    ):
        for first, last in itertools.pairwise(bounds):
            readouts = GroupReadouts(reader, attention, {i: layers[i] for i in order[first:last]})
            num_tokens = {False: 0, True: 0}
            for number, (text, ids) in enumerate(kept, start=1):
                starts = reader.places(len(ids), seed, number)
                held_out = number % held_out_every == 0
                readouts.add(text, starts, held_out)
                num_tokens[held_out] += len(starts) * continuation_length
                progress.update()
            for i, corrections in readouts.solve(ridge_strengths).items():
                _replace(mapper.layers[i], layers[i], corrections)
                reports[i] = _report(corrections)
    mapper.config.fit = (mapper.config.fit or {}) | {
        "readout": settings
        | {
            "seed": seed,
            "num_texts": len(kept),
            "train_tokens": num_tokens[False],
            "held_out_tokens": num_tokens[True],
            "layers": reports,
        }
    }
    return mapper


def _replace(layer_map: nn.Module, layer: LayerGeometry, corrections: Sequence[Correction]) -> None:
    for head, correction in zip(value_heads(layer_map, layer), corrections, strict=True):
        head.weight.copy_(correction.weight)
        head.bias.copy_(correction.bias)


def _report(corrections: Sequence[Correction]) -> dict[str, Any]:
    before, after, native = (sum(part) for part in zip(*(c.held_out for c in corrections), strict=True))
    return {
        "held_out_error": [before / max(native, 1e-300), after / max(native, 1e-300)],
        "ridge_strengths": [correction.strength for correction in corrections],
    }
