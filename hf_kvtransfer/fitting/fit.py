"""`fit_mapper`: calibration text in, mapper out, in closed form."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..compat import public_name
from ..errors import CalibrationError
from ..geometry import KVGeometry
from ..mapper import KVMapper, KVMapperConfig
from ..tokenizer_identity import tokenizer_fingerprint
from .moments import Moments
from .ridge import RIDGE_STRENGTHS, Gaussian, fit_ridge
from .selection import LayerScreening
from .states import TOKENS, PairedStates
from .text import calibration_texts


def fit_mapper(
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Path | Iterable,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    num_source_layers: int = 4,
    token_features: bool = True,
    sink_tokens: int = 4,
    max_length: int = 1024,
    batch_size: int = 8,
    held_out_every: int = 10,
    screening_tokens: int = 16384,
    ridge_strengths: Sequence[float] = RIDGE_STRENGTHS,
    moment_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> KVMapper:
    """
    Fit a mapper from one model's cache to another's by ridge regression on sums over calibration text.

    Both models read each text once (the first `screening_tokens` twice), and no logits are kept. Memory does not grow
    with the amount of text: it is the two models, one batch of their states, and for each target layer a matrix of
    `(num_source_layers * source width + embedding width)**2` float64 numbers, shared between target layers where they
    read the same source layers.

    Args:
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models.
        texts (`str`, `Path` or `Iterable`):
            A JSONL or text file, the name of a dataset, or an iterable of strings; of token ids if the two models
            share a vocabulary and no tokenizer is given.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The models' tokenizers. One is enough if they share it.
        num_source_layers (`int`, *optional*, defaults to 4):
            Source layers that each target layer reads, chosen by held-out explained variance.
        token_features (`bool`, *optional*, defaults to `True`):
            Whether the maps also read the target's embedding of the token.
        sink_tokens (`int`, *optional*, defaults to 4):
            First tokens of each text that are left out: attention sinks are outliers, and the target reads its own.
        max_length (`int`, *optional*, defaults to 1024):
            Target tokens to which each text is cut.
        batch_size (`int`, *optional*, defaults to 8):
            Texts read at once.
        held_out_every (`int`, *optional*, defaults to 10):
            Each how-manieth text is kept out of the sums, to choose layers and ridge strengths on.
        screening_tokens (`int`, *optional*, defaults to 16384):
            Target tokens on which source layers are chosen.
        ridge_strengths (`Sequence[float]`, *optional*):
            Candidates, relative to the mean eigenvalue of the standardised features' covariance.
        moment_dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Of the products of one batch; sums are float64 whatever this is.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Of the mapper's weights.
        seed (`int`, *optional*, defaults to 0):
            Of the random projections that layers are chosen by.

    Returns:
        [`KVMapper`]: Its config's `fit` holds the settings, the amount of text, and for each layer the ridge strengths
        and the held-out explained variance.

    Raises:
        `CalibrationError`: too little text for the features asked for, states that are not finite, or texts of the
            wrong kind.
    """
    source_tokenizer, target_tokenizer = source_tokenizer or target_tokenizer, target_tokenizer or source_tokenizer
    geometries = KVGeometry.from_model(source), KVGeometry.from_model(target)
    source_layers, target_layers = (
        [i for i, layer in enumerate(geometry.layers) if layer is not None] for geometry in geometries
    )
    widths = {i: geometries[1].layers[i].widths for i in target_layers}
    reader = PairedStates(source, target, source_tokenizer, target_tokenizer, token_features, sink_tokens, max_length)
    stream = iter(calibration_texts(texts))
    first_texts: list = []

    if num_source_layers < len(source_layers):
        first_texts = _take(reader, stream, screening_tokens)
        screening = LayerScreening(source_layers, token_features, widths, seed)
        batches = list(reader.batches(first_texts, batch_size, held_out_every))
        for held_out, batch in logging.tqdm(batches, desc="Choosing source layers"):
            screening.add(reader.read(batch), held_out)
        _check_enough_text(1, *screening.counts, len(first_texts))
        selection = screening.select(num_source_layers)
    else:
        selection = dict.fromkeys(target_layers, source_layers)

    blocks = {i: [("source", j) for j in chosen] + [TOKENS] * token_features for i, chosen in selection.items()}
    train, held_out_sums = (Moments(_pairs(blocks), moment_dtype) for _ in range(2))
    num_texts = 0
    with logging.tqdm(desc="Summing over calibration text", unit="text", total=_length(texts)) as progress:
        for held_out, batch in reader.batches(itertools.chain(first_texts, stream), batch_size, held_out_every):
            (held_out_sums if held_out else train).add(reader.read(batch))
            num_texts += len(batch)
            progress.update(len(batch))
    num_features = max(train.width(names) for names in blocks.values()) if train.count else 1
    _check_enough_text(num_features, train.count, held_out_sums.count, num_texts)

    num_layers = len(geometries[1].layers)
    weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    reports: list[dict | None] = [None] * num_layers
    for i, names in logging.tqdm(blocks.items(), desc="Solving layers"):
        groups = [slice(0, widths[i][0]), slice(widths[i][0], sum(widths[i]))]
        train_rows, held_out_rows = (_gaussian(moments, names, ("target", i)) for moments in (train, held_out_sums))
        fit = fit_ridge(train_rows, held_out_rows, groups, ridge_strengths)
        weight, bias = weights[i] = fit.weight.to(dtype), fit.bias.to(dtype)
        reports[i] = {
            "ridge_strengths": fit.strengths,
            # Of the weights as they are saved, rounded.
            "explained_variance": [
                held_out_rows.explained_variance(weight[:, columns].double(), bias[columns].double(), columns)
                for columns in groups
            ],
        }
    config = KVMapperConfig(
        source=_describe(source, geometries[0], source_tokenizer),
        target=_describe(target, geometries[1], target_tokenizer),
        layers=[
            {"kind": "linear", "source_layers": selection[i]} if i in weights else None for i in range(num_layers)
        ],
        token_features=target.get_input_embeddings().embedding_dim if token_features else 0,
        sink_tokens=sink_tokens,
        fit={
            "num_texts": num_texts,
            "train_tokens": train.count,
            "held_out_tokens": held_out_sums.count,
            "max_length": max_length,
            "seed": seed,
            "layers": reports,
        },
    )
    mapper = KVMapper(config).to(dtype)
    with torch.no_grad():
        for i, (weight, bias) in weights.items():
            mapper.layers[i].weight.copy_(weight.T)
            mapper.layers[i].bias.copy_(bias)
    return mapper.eval().requires_grad_(False)


def _take(reader: PairedStates, stream: Iterator, num_tokens: int) -> list:
    """The first texts of `stream`, as many as have `num_tokens` target tokens."""
    taken: list = []
    while num_tokens > 0 and (text := next(stream, None)) is not None:
        taken.append(text)
        num_tokens -= reader.cut(text)[1]
    return taken


def _length(texts: Any) -> int | None:
    return len(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else None


def _pairs(blocks: dict[int, list]) -> dict:
    """Which products the solves need: features with features, and with their target layer."""
    pairs: dict = {}
    for i, names in blocks.items():
        pairs |= dict.fromkeys(itertools.combinations_with_replacement(names, 2))
        pairs |= dict.fromkeys((name, ("target", i)) for name in names)
    return pairs


def _check_enough_text(num_features: int, num_train: int, num_held_out: int, num_texts: int) -> None:
    if num_train < 2 * num_features or not num_held_out:
        raise CalibrationError(
            f"{num_texts} texts gave {num_train} tokens to fit on and {num_held_out} held out. For {num_features} "
            f"features at least {2 * num_features} are needed, and some held out: give more text, or lower "
            "`num_source_layers`."
        )


def _gaussian(moments: Moments, names: list, target: tuple) -> Gaussian:
    return Gaussian(
        moments.mean(names),
        moments.mean([target]),
        moments.covariance(names, names),
        moments.covariance(names, [target]),
        moments.variance([target]),
    )


def _describe(model: PreTrainedModel, geometry: KVGeometry, tokenizer: PreTrainedTokenizerBase | None) -> dict:
    return {
        "name": public_name(model),
        "geometry": geometry.to_dict(),
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
    }
