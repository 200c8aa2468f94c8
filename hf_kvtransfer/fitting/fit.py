"""`fit_mapper`: calibration text in, mapper out, in closed form."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..compat import public_name
from ..geometry import KVGeometry
from ..identity import ModelIdentity
from ..identity.tokenizer import tokenizer_fingerprint
from ..mapper import KVMapper, KVMapperConfig
from .arguments import check_numbers, parse_bytes
from .budget import Budget
from .checkpoint import Checkpoint
from .costs import MapPlan
from .inputs import Inputs
from .kept_states import KeptStates
from .layer_fit import FittedLayer, fit_layers
from .memory import memory_groups
from .processes import Processes
from .ridge import RIDGE_STRENGTHS
from .stages import Reading, check_enough_text, choose_inputs, sum_in_groups, take_tokens
from .states import PairedStates
from .text import calibration_texts


KINDS = ("linear", "head_matched", "low_rank", "identity", "residual_mlp")

# If neither it nor a budget is given.
NUM_SOURCE_LAYERS = 4
# Among which a budget chooses, if nothing is said. Further ones tell next to nothing.
MOST_PREVIOUS_TOKENS = 3


def fit_mapper(
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Path | Mapping | Iterable | None = None,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    kind: str = "linear",
    native_layers: int | None = 0,
    num_source_layers: int | None = None,
    budget: str | int | None = None,
    storage_bits: int | None = None,
    rank: int | None = None,
    hidden_size: int | None = None,
    token_features: bool = True,
    previous_tokens: int | None = None,
    importance: Mapping[int, tuple[float, float]] | None = None,
    sink_tokens: int = 4,
    max_tokens: int | None = 200_000,
    max_length: int = 1024,
    batch_size: int = 8,
    held_out_every: int = 10,
    screening_tokens: int = 16384,
    ridge_strengths: Sequence[float] = RIDGE_STRENGTHS,
    output_metrics: Mapping[int, torch.Tensor] | None = None,
    moment_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    memory: str | int | None = None,
    keep_states: str | Path | None = None,
) -> KVMapper:
    """
    Fit a mapper from one model's cache to another's by ridge regression on sums over calibration text.

    Both models read each text once (the first `screening_tokens` twice), and no logits are kept. Memory does not grow
    with the amount of text: it is the two models, one batch of their states, and for each target layer a matrix of
    `(source layers * source width + token feature width)**2` float64 numbers, shared between target layers where they
    read the same source layers. With `memory` it is not more than that many bytes beside the models and the mapper.

    Called in every process of an `accelerate launch` or `torchrun`, each reads its share of the same texts, with its
    own copy of the models, and solves its share of the layers; all return the same mapper, which one of them is to
    save.

    Args:
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models.
        texts (`str`, `Path`, `Mapping` or `Iterable`, *optional*):
            A JSONL or text file, the name of a dataset, an iterable of strings or dialogues, or a mixture of these
            with the share of each, see [`calibration_texts`]; token ids if the two models share a vocabulary and no
            tokenizer is given. By default FineWeb-Edu, streamed.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The models' tokenizers. One is enough if they share it.
        kind (`str`, *optional*, defaults to `"linear"`):
            `"linear"`, `"head_matched"` (smaller where there are many KV heads), `"low_rank"`, `"identity"` (for
            models that cache nearly the same), or `"residual_mlp"`, of which only the linear part is fitted here and
            the rest adds nothing.
        native_layers (`int`, *optional*, defaults to 0):
            The target layer up to which the target computes its own keys and values: exactly, at the cost of running
            that many layers on the whole context. What it makes of the tokens on the way are features for all other
            layers. With `None` every layer is mapped, and the features are the target's embeddings.
        num_source_layers (`int`, *optional*):
            Source layers that each target layer reads, chosen by held-out explained variance; by default 4, and one
            for kind `"identity"`.
        budget (`str` or `int`, *optional*):
            Instead of it what the mapper may take: `"45MB"` or a number of bytes, of the saved weights; or
            `"20000tokens/s"`, as much as the target's device can multiply in that time. Source layers, and tokens
            before, go where they add most explained variance for what they cost.
        storage_bits (`int`, *optional*):
            8 or 4, to quantise the weights. By default they are of `dtype`.
        rank (`int`, *optional*):
            Of `"low_rank"` maps, by default a quarter of the target's width; of the correction of `"identity"` maps,
            by default none.
        hidden_size (`int`, *optional*):
            Of the MLP of `"residual_mlp"` maps.
        token_features (`bool`, *optional*, defaults to `True`):
            Whether the maps also read what the target itself knows of a token. `"identity"` maps never do.
        previous_tokens (`int`, *optional*):
            Of how many tokens before a token the maps read it, too: keys say what came before, by which later tokens
            find them. By default none; with a budget at most this many, by default 3.
        importance (`Mapping[int, tuple[float, float]]`, *optional*):
            For target layers what a share of the variance of keys, and of values, is worth when it is chosen what they
            read. By default 1 of each. Where predictions hang on few layers, these deserve more of a budget.
        sink_tokens (`int`, *optional*, defaults to 4):
            First tokens of each text that are left out: attention sinks are outliers, and the target reads its own.
        max_tokens (`int`, *optional*, defaults to 200000):
            Target tokens after which no more text is read. `None` reads all of it.
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
        output_metrics (`Mapping[int, torch.Tensor]`, *optional*):
            For target layers what an error costs, see [`LayerProblem`]: decides what maps of a rank give up.
        moment_dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Of the products of one batch; sums are float64 whatever this is.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Of the mapper's weights.
        seed (`int`, *optional*, defaults to 0):
            Of the random projections that layers are chosen by, and of draws from a mixture.
        checkpoint (`str` or `Path`, *optional*):
            A folder in which sums are kept from time to time. The same call with the same texts goes on from them
            after an interruption. They are deleted when the fit is done.
        memory (`str` or `int`, *optional*):
            What sums and solves may take: `"16GB"` or a number of bytes. Where it is too little for all target layers
            at once, the states of both models are written to `checkpoint` and target layers are taken in groups.
        keep_states (`str` or `Path`, *optional*):
            A folder for what both models make of each text. Another fit of the same models on the same texts, with
            another kind of map, budget or number of layers, takes it from there and lets no model read. For each
            token it holds the keys and values of both models, in their dtypes: delete it when it is not needed any
            more.

    Returns:
        [`KVMapper`]: Its config's `fit` holds the settings, the amount of text, and for each layer the ridge
        strengths, the held-out explained variance of keys and of values, and the bytes that it takes.

    Raises:
        `CalibrationError`: too little text for the features asked for, states that are not finite, texts of the wrong
            kind or that a tokenizer cannot read, a budget below the smallest mapper, a checkpoint of another fit, a
            disk or a memory that is too small, or another process that has ended.
        `UnsupportedModelError`: a model has a layer that keeps no state for each token.
        `ValueError`: an argument is impossible, or does not go with another.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}.")
    if num_source_layers is not None and (budget is not None or kind == "identity"):
        other = "`budget` decides" if budget is not None else "kind 'identity' reads one"
        raise ValueError(f"`num_source_layers={num_source_layers}` cannot be chosen here: {other}. Leave it out.")
    if num_source_layers is not None and num_source_layers < 1:
        raise ValueError(f"`num_source_layers` must be at least 1, got {num_source_layers}.")
    reads_tokens = token_features and kind != "identity"
    if previous_tokens is None:
        previous_tokens = MOST_PREVIOUS_TOKENS if budget is not None and reads_tokens else 0
    if previous_tokens < 0:
        raise ValueError(f"`previous_tokens` must be 0 or more, got {previous_tokens}.")
    if previous_tokens and not reads_tokens:
        raise ValueError(f"`previous_tokens={previous_tokens}` need token features, which these maps do not read.")
    check_numbers(max_length=max_length, batch_size=batch_size, held_out_every=held_out_every)
    if storage_bits not in (None, 8, 4):
        raise ValueError(f"`storage_bits` must be 8, 4 or None, got {storage_bits!r}.")
    source_tokenizer, target_tokenizer = source_tokenizer or target_tokenizer, target_tokenizer or source_tokenizer
    allowed = None if memory is None else parse_bytes("memory", memory)
    if memory is not None and checkpoint is None:
        raise ValueError(f"`memory={memory!r}` needs `checkpoint`, a folder with room for states of both models.")
    processes = Processes(source, target)
    geometries = KVGeometry.from_model(source), KVGeometry.from_model(target)
    make_states = PairedStates if keep_states is None else functools.partial(KeptStates, Path(keep_states))
    states = make_states(
        source,
        target,
        source_tokenizer,
        target_tokenizer,
        reads_tokens,
        sink_tokens,
        max_length,
        native_layers,
        previous_tokens,
    )
    target_layers = {
        i: layer
        for i, layer in enumerate(geometries[1].layers)
        if layer is not None and (native_layers is None or i > native_layers)
    }
    if not target_layers:
        raise ValueError(f"`native_layers={native_layers}` leaves no layer of the target to map: take a prefill.")
    if unknown := sorted((importance or {}).keys() - target_layers.keys()):
        raise ValueError(f"`importance` is of target layers that are not mapped: {unknown}. Leave them out.")
    plan = MapPlan(
        kind,
        *geometries,
        _token_width(target, native_layers) if reads_tokens else 0,
        rank,
        hidden_size,
        dtype,
        None if storage_bits is None else {"bits": storage_bits, "group_size": 64},
    )
    limit = None if budget is None else Budget.parse(budget, target, plan)
    settings = {
        "kind": kind,
        "native_layers": native_layers,
        "num_source_layers": num_source_layers,
        "budget": budget,
        "storage_bits": storage_bits,
        "rank": rank,
        "hidden_size": hidden_size,
        "token_features": plan.token_features,
        "previous_tokens": previous_tokens,
        "importance": None if importance is None else {str(i): list(worth) for i, worth in importance.items()},
        "sink_tokens": sink_tokens,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "seed": seed,
    }
    keeping = None
    if checkpoint is not None:
        keeping = settings | {
            "batch_size": batch_size,
            "held_out_every": held_out_every,
            "screening_tokens": screening_tokens,
            "memory": memory,
            "moment_dtype": str(moment_dtype),
            "dtype": str(dtype),
            "source": ModelIdentity.from_model(source, source_tokenizer).to_dict(),
            "target": ModelIdentity.from_model(target, target_tokenizer).to_dict(),
        }
    kept = Checkpoint(None if checkpoint is None else Path(checkpoint), keeping or {}, processes)
    reading = Reading(states, batch_size, held_out_every, kept, processes)

    stream = take_tokens(states, states.whole(calibration_texts(texts, target_tokenizer, seed)), max_tokens)
    first_texts: list = []
    source_layers = [i for i, layer in enumerate(geometries[0].layers) if layer is not None]
    wanted = NUM_SOURCE_LAYERS if num_source_layers is None else num_source_layers
    if (found := kept.finished("selection")) is not None:
        selection = {int(i): Inputs(**chosen) for i, chosen in found.items()}
    elif wanted < len(source_layers) or budget is not None or kind == "identity":
        first_texts = list(take_tokens(states, stream, screening_tokens))
        chosen = choose_inputs(
            reading, first_texts, plan, target_layers, wanted, previous_tokens, importance or {}, limit, seed
        )
        selection = processes.of(0, chosen)
    else:
        selection = dict.fromkeys(target_layers, Inputs(source_layers, previous_tokens))

    results = {"selection": {str(i): inputs.to_json() for i, inputs in selection.items()}}
    groups = memory_groups(plan, selection, allowed)
    with logging.tqdm(desc="Summing over calibration text", unit="text", total=_length(texts)) as progress:
        num_texts, (num_train, num_held_out), sums_of_groups = sum_in_groups(
            reading, itertools.chain(first_texts, stream), plan, groups, moment_dtype, results, progress
        )
    num_features = max(plan.num_features(i, inputs) for i, inputs in selection.items()) if num_train else 1
    check_enough_text(num_features, num_train, num_held_out, num_texts, held_out_every)
    fitted: dict[int, FittedLayer] = {}
    with logging.tqdm(desc="Solving layers", total=len(selection)) as progress:
        for sums in sums_of_groups:
            fitted |= fit_layers(plan, sums, output_metrics or {}, ridge_strengths, seed, processes)
            progress.update(len(sums.selection))
            del sums  # the next ones take their place

    specs: list[dict | None] = [None if layer is None else {"kind": "native"} for layer in geometries[1].layers]
    reports: list[dict | None] = [
        None if layer is None else {"explained_variance": [1.0, 1.0], "bytes": 0} for layer in geometries[1].layers
    ]
    for i, layer in fitted.items():
        specs[i], reports[i] = layer.spec, layer.report
    config = KVMapperConfig(
        source=_describe(source, geometries[0], source_tokenizer),
        target=_describe(target, geometries[1], target_tokenizer),
        layers=specs,
        token_features=plan.token_features,
        sink_tokens=sink_tokens,
        storage=plan.storage,
    )
    with torch.device("meta"):  # its own maps are thrown away
        mapper = KVMapper(config)
    for i, layer in fitted.items():
        mapper.layers[i] = layer.layer_map
    mapper.config.fit = settings | {
        "num_texts": num_texts,
        "train_tokens": num_train,
        "held_out_tokens": num_held_out,
        "layers": reports,
    }
    kept.remove()
    return mapper.eval().requires_grad_(False)


def _token_width(target: PreTrainedModel, native_layers: int | None) -> int:
    if native_layers is None:
        return target.get_input_embeddings().embedding_dim
    return target.config.get_text_config().hidden_size


def _length(texts: Any) -> int | None:
    return len(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else None


def _describe(model: PreTrainedModel, geometry: KVGeometry, tokenizer: PreTrainedTokenizerBase | None) -> dict:
    return {
        "name": public_name(model),
        "geometry": geometry.to_dict(),
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
    }
