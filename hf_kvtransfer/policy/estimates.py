"""What a mapper will cost before it is there, or where nobody has noted what it took."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compat import public_name
from ..fitting.costs import MapPlan
from ..fitting.fit import NUM_SOURCE_LAYERS
from ..fitting.inputs import Inputs
from ..geometry import KVGeometry
from ..identity.tokenizer import tokenizer_fingerprint
from ..mapper import KVMapper, KVMapperConfig
from .costs import MeasuredCosts


# What `fit` reads by default: target tokens, in texts of up to so many.
FIT_TOKENS, FIT_LENGTH = 200_000, 1024
# A fit takes so many times the two models' forward passes, as measured for the shipped mapper.
_FIT_OVER_PASSES = 1.55
# What the shipped mapper was measured on: documents, of so many target tokens each.
EVALUATED_DOCUMENTS, EVALUATED_LENGTH = 150, 320
# Arms of an evaluation that are translations, without those of efforts.
_TRANSLATED_ARMS = 4


def fit_seconds(costs: MeasuredCosts, mapper: KVMapper | None = None) -> float:
    """
    What fitting takes, in seconds, estimated.

    Args:
        costs ([`MeasuredCosts`]):
            Of the pair.
        mapper ([`KVMapper`], *optional*):
            One that was fitted, whose config says on how much text. By default as much as `fit_mapper` reads.
    """
    fit: dict[str, Any] = (mapper.config.fit if mapper is not None else None) or {}
    tokens = fit.get("train_tokens", FIT_TOKENS) + fit.get("held_out_tokens", 0)
    length = max(round(tokens / fit["num_texts"]), 1) if fit.get("num_texts") else FIT_LENGTH
    passes = costs.prefill.seconds(length) + costs.source_prefill.seconds(length)
    return _FIT_OVER_PASSES * passes * tokens / length


def validation_seconds(costs: MeasuredCosts, mapper: KVMapper | None = None) -> float:
    """
    What measuring a mapper takes, in seconds, estimated.

    Args:
        costs ([`MeasuredCosts`]):
            Of the pair.
        mapper ([`KVMapper`], *optional*):
            One that was measured, whose evidence says on how much text. By default as much as the shipped one was.
    """
    report = mapper.evidence if mapper is not None else None
    documents, length, efforts = EVALUATED_DOCUMENTS, EVALUATED_LENGTH, []
    if report is not None:
        documents = report.figures["documents"]
        settings = report.settings
        length = settings.get("context_tokens", 256) + settings.get("continuation_tokens", 64)
        efforts = settings.get("efforts", [])
    arms = [costs.handoff] * _TRANSLATED_ARMS + [costs.handoff_with(effort) for effort in efforts]
    passes = [costs.prefill, costs.source_prefill, *arms]
    return documents * sum(reading.seconds(length) for reading in passes)


def unfitted_mapper(
    source: PreTrainedModel,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
) -> KVMapper:
    """
    A mapper of about the layout that `fit_mapper` gives it by default, whose weights mean nothing: it takes as long as
    a fitted one, and is only good for that.

    Args:
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Their tokenizers.

    Raises:
        `UnsupportedModelError`: a model has a layer that keeps no state for each token.
    """
    sides = (source, source_tokenizer or target_tokenizer), (target, target_tokenizer or source_tokenizer)
    geometries = KVGeometry.from_model(source), KVGeometry.from_model(target)
    width = target.config.get_text_config().hidden_size
    plan = MapPlan("linear", *geometries, width)
    readable = [i for i, layer in enumerate(geometries[0].layers) if layer is not None]
    layers = geometries[1].layers
    specs: list[dict | None] = []
    for i, layer in enumerate(layers):
        # At proportional depth.
        first = round(i / len(layers) * max(len(readable) - NUM_SOURCE_LAYERS, 0))
        chosen = readable[first : first + NUM_SOURCE_LAYERS]
        specs.append(None if layer is None else plan.spec(i, Inputs(chosen)) if i else {"kind": "native"})
    described = [
        {
            "name": public_name(model),
            "geometry": geometry.to_dict(),
            "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        }
        for (model, tokenizer), geometry in zip(sides, geometries, strict=True)
    ]
    config = KVMapperConfig(source=described[0], target=described[1], layers=specs, token_features=width)
    with torch.random.fork_rng(devices=[]):
        mapper = KVMapper(config)
    return mapper.to(target.dtype).eval().requires_grad_(False)
