"""Measure what a handoff costs, and the prefill that it replaces, as a user would wait for them."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..alignment.spans import encode_with_spans
from ..cache import TranslatedCache
from ..compat import input_device, read_into_cache
from ..effort import find_check_layer
from ..errors import RefusedError
from ..fidelity.gate import FidelityGate
from ..first_tokens import HELD
from ..geometry import KVGeometry
from ..mapper import KVMapper
from ..source import SourceKV
from .costs import MeasuredCosts, costs_file, what_decides_costs
from .machine import reference_seconds
from .time_model import TimeModel


# In target tokens. Attention grows with the square of the length: the longest tells most about it.
LENGTHS = (128, 512, 1536, 4096)


def measure_costs(
    mapper: KVMapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    lengths: Sequence[int] = LENGTHS,
    runs: int = 3,
    fresh: bool = False,
) -> MeasuredCosts:
    """
    Measure prefills and handoffs of some lengths, in turn, and fit a model of time to their medians.

    Both end with the target's first logits. A handoff begins with the source's cache in hand, and is everything that
    [`TranslatedCache`] does by default: holding the models against the evidence, aligning, reading the first tokens
    natively, the probe, and all layers. What the text says does not matter, it is made up.

    What was measured before, of models and a mapper of the same shapes on this machine, with as many threads and the
    same versions of torch and transformers, is read from `$HF_KVTRANSFER_HOME/costs`.

    Args:
        mapper ([`KVMapper`]):
            Fitted for the pair, in the dtype in which it is to be used.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models, where they are to run.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Their tokenizers. One is enough if they share it, none for token ids of one vocabulary.
        lengths (`Sequence[int]`, *optional*, defaults to `(128, 512, 1536, 4096)`):
            Target tokens. Those that a model is not made for are left out.
        runs (`int`, *optional*, defaults to 3):
            Measurements of each length, after one of the shortest to warm up.
        fresh (`bool`, *optional*, defaults to `False`):
            Measure again, whatever was measured before.

    Returns:
        [`MeasuredCosts`]

    Raises:
        `ValueError`: fewer than two lengths are left, or there is no run.
        [`KVTransferError`]: the mapper is not for this pair.
    """
    if runs < 1:
        raise ValueError(f"`runs` must be at least 1, got {runs}.")
    usable = [length for length in sorted(set(lengths)) if 2 <= length <= longest_context(source, target)]
    if len(usable) < 2:
        raise ValueError(
            f"`lengths` is {list(lengths)}, of which these models can read {usable}. Give two lengths or more of 2 "
            f"to {longest_context(source, target)} tokens."
        )
    about = what_decides_costs(mapper, source, target, lengths=usable, runs=runs)
    path = costs_file(about)
    if not fresh and (known := MeasuredCosts.load(path, about)) is not None:
        return known
    medians = time_lengths(
        mapper,
        source,
        target,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        lengths=usable,
        runs=runs,
    )
    fit = partial(TimeModel.fit, usable)
    geometry = KVGeometry.from_model(target)
    layers = [layer for layer in geometry.layers if layer is not None]
    costs = MeasuredCosts(
        fit([row["prefill"] for row in medians], quadratic=True),
        fit([row["handoff"] for row in medians], quadratic=False),
        fit([row["source_prefill"] for row in medians], quadratic=True),
        medians,
        statistics.median(row["reference"] for row in medians),
        str(input_device(target)) if len(about["target"]["devices"]) == 1 else None,
        target.dtype.itemsize * sum(sum(layer.widths) for layer in layers),
        target.dtype.itemsize * max(sum(layer.widths) for layer in layers),
        find_check_layer(geometry, [mapper]) / len(geometry.layers),
    )
    costs.save(path, about)
    return costs


def time_lengths(
    mapper: KVMapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    lengths: Sequence[int],
    runs: int,
) -> list[dict[str, float]]:
    """
    What [`measure_costs`] fits its models to.

    Returns:
        `list[dict]`: For each length the `tokens`, medians of `prefill`, `handoff` and [`reference_seconds`] in turn,
        and the one `source_prefill`.
    """
    tokenizers = source_tokenizer or target_tokenizer, target_tokenizer or source_tokenizer
    # The longest first: it hardly shows that its prefill is the source's first.
    contexts = {
        length: _Context(length, mapper, source, target, *tokenizers) for length in sorted(lengths, reverse=True)
    }
    device = input_device(target)
    times: dict[int, dict[str, list[float]]] = {
        length: {"prefill": [], "handoff": [], "reference": []} for length in lengths
    }
    for run in logging.tqdm(range(runs + 1), desc="Measuring prefills and handoffs"):
        for length in lengths if run else lengths[:1]:
            measured = {name: _seconds(getattr(contexts[length], name)) for name in ("prefill", "handoff")}
            measured["reference"] = reference_seconds(device)
            for name, seconds in measured.items() if run else ():
                times[length][name].append(seconds)
    return [
        {"tokens": length}
        | {name: statistics.median(seconds) for name, seconds in times[length].items()}
        | {"source_prefill": contexts[length].source_seconds}
        for length in lengths
    ]


class _Context:
    """One context of some length that both models can read."""

    def __init__(
        self,
        length: int,
        mapper: KVMapper,
        source: PreTrainedModel,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase | None,
        target_tokenizer: PreTrainedTokenizerBase | None,
    ):
        self.mapper, self.target, self.target_tokenizer = mapper, target, target_tokenizer
        if target_tokenizer is None:
            words = min(source.get_input_embeddings().num_embeddings, target.get_input_embeddings().num_embeddings)
            self.input_ids = torch.arange(length)[None] % (words - 1) + 1
            context: Any = self.input_ids
        else:
            text = "".join(
                f"On day {i} the clerk counted {i * 37 % 1009} crates at the quay. " for i in range(length // 8 + 1)
            )
            ids, spans = encode_with_spans(target_tokenizer, text)
            context = text[: spans[length - 1][1]]
            self.input_ids = torch.tensor([ids[:length]])
        began = time.perf_counter()
        self.source_kv = SourceKV.prefill(source, source_tokenizer, context)
        self.source_seconds = time.perf_counter() - began

    def prefill(self) -> None:
        self._read(DynamicCache(config=self.target.config), self.input_ids)

    def handoff(self) -> None:
        HELD.pop(self.target, None)  # contexts to come may begin otherwise
        try:
            cache: Any = TranslatedCache(
                self.source_kv,
                self.mapper,
                self.target,
                target_tokenizer=self.target_tokenizer,
                gate=FidelityGate(strict=False),
                on_refusal="raise",
            )
        except RefusedError:  # by the probe, which has read the translation of all layers by then
            cache = DynamicCache(config=self.target.config)
        self._read(cache, self.input_ids[:, -1:])

    def _read(self, cache: DynamicCache, input_ids: torch.Tensor) -> None:
        logits = read_into_cache(self.target, cache, input_ids, num_logits=1)
        if logits is not None:
            logits.cpu()  # waits for the device


def _seconds(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def longest_context(*models: PreTrainedModel) -> int:
    """Tokens that all of some models can read, or a length to be content with where none of them says."""
    lengths = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    return min((length for length in lengths if length), default=max(LENGTHS))
