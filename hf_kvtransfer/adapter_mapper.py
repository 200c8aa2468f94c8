"""`adapter_mapper`: from a model to itself with an adapter, or from one adapter to another, without any data."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import PairMismatchError, UnsupportedModelError
from .exactness import exact_layers
from .fitting import fit_mapper
from .identity import ModelIdentity
from .identity.tensors import VIRTUAL_TOKENS
from .mapper import KVMapper, KVMapperConfig
from .source import SourceKV


def adapter_mapper(
    source: PreTrainedModel | SourceKV,
    target: PreTrainedModel,
    texts: str | Path | Mapping | Iterable | None = None,
    *,
    rank: int = 16,
    **options: Any,
) -> KVMapper:
    """
    A mapper between two uses of one model that differ in their adapters: a base model and a LoRA of it, either way, or
    two LoRAs. Merged adapters, and fine-tunes that leave early layers as they are, count as well.

    Every layer takes the keys and values of the source's layer as they are. That is exact up to the first layer that
    depends on what has changed, which is seen from the models, see [`exact_layers`]: an adapter on the MLPs of layers
    10 and later leaves layers 0 to 10 exact, one on the keys or values of all layers leaves none. If all layers are
    exact, the default gate admits the mapper without measured evidence, having looked at the models itself. Else it
    asks for evidence, as for any mapper: run [`evaluate_mapper`].

    Args:
        source (`PreTrainedModel` or [`SourceKV`]):
            The model that reads, or what it has read: a model whose adapters are switched between the two is no longer
            the source when it is the target.
        target (`PreTrainedModel`):
            The model that continues, with the adapters active that it will continue with.
        texts (`str`, `Path`, `Mapping` or `Iterable`, *optional*):
            Calibration text, as for [`fit_mapper`], for a low-rank correction of the layers that are not exact. Then
            the two models must be two objects.
        rank (`int`, *optional*, defaults to 16):
            Of the correction.
        options:
            For [`fit_mapper`], if there are texts: `source_tokenizer` and so on.

    Returns:
        [`KVMapper`]: Its config's `fit` names the `exact_layers`, and the modules that have `changed`.

    Raises:
        `PairMismatchError`: the two models cache something of another shape.
        `UnsupportedModelError`: the target has virtual tokens (prompt or prefix tuning), which no cache of another
            model has in front.
        `ValueError`: `options` without texts, or texts and one model for both sides.

    Example:

    ```python
    >>> with model.disable_adapter():
    ...     source_kv = SourceKV.prefill(model, tokenizer, document)
    >>> for name in ("summaries", "contracts"):
    ...     model.set_adapter(name)
    ...     cache = TranslatedCache(source_kv, adapter_mapper(source_kv, model), model)
    ...     output = generate(model, inputs[name], cache)
    ```
    """
    if texts is None and options:
        raise ValueError(f"`options` {sorted(options)} are for a fit, and there are no `texts` to fit on.")
    identity = source.identity if isinstance(source, SourceKV) else ModelIdentity.from_model(source)
    found = ModelIdentity.from_model(target)
    if identity.geometry != found.geometry:
        raise PairMismatchError(
            f"The source ({identity.name}) caches {identity.geometry.describe()}, the target ({found.name}) "
            f"{found.geometry.describe()}: they are not one model with other adapters. Use `fit_mapper`."
        )
    for side, adapters in (("source", identity.adapters), ("target", found.adapters)):
        for name, tensors in adapters.items():
            if any(tensor.startswith(VIRTUAL_TOKENS) for tensor in tensors):
                raise UnsupportedModelError(
                    f"Adapter {name} of the {side} is virtual tokens in front of the context, which a cache of the "
                    "other model does not hold. Let the target read the context itself."
                )
    exact = exact_layers(identity, target)
    # One tokenizer, whichever it is: the two are one model.
    about = {"geometry": identity.geometry.to_dict(), "tokenizer": identity.tokenizer}
    layers = [None if layer is None else _copy(i) for i, layer in enumerate(identity.geometry.layers)]
    config = KVMapperConfig(
        source={"name": _named(identity), **about}, target={"name": _named(found), **about}, layers=layers
    )
    mapper = KVMapper(config)
    if texts is not None and len(exact.layers) < len(config.mapped_layers):
        if isinstance(source, SourceKV) or source is target:
            raise ValueError(
                "`texts` are read by both models at once: pass as `source` the model itself, loaded apart from the "
                "target, and not what it has read."
            )
        fitted = fit_mapper(source, target, texts, kind="identity", native_layers=None, rank=rank, **options)
        mapper = _corrected(fitted, exact.layers)
    mapper.config.fit = (mapper.config.fit or {}) | {
        "exact_layers": list(exact.layers),
        "changed": list(exact.changed),
    }
    return mapper.eval().requires_grad_(False)


def _corrected(fitted: KVMapper, exact: tuple[int, ...]) -> KVMapper:
    """A fitted mapper with copies in place of the maps of layers that are exact."""
    config = copy.deepcopy(fitted.config)
    for i in exact:
        config.layers[i] = _copy(i)
        config.fit["layers"][i] = {"explained_variance": [1.0, 1.0], "bytes": 0}
    with torch.device("meta"):  # its own maps are thrown away
        mapper = KVMapper(config)
    for i in config.mapped_layers:
        if i not in exact:
            mapper.layers[i] = fitted.layers[i]
    return mapper


def _copy(layer_idx: int) -> dict[str, Any]:
    return {"kind": "identity", "source_layers": [layer_idx], "rank": 0}


def _named(identity: ModelIdentity) -> str:
    return " + ".join([identity.name, *identity.adapters])
