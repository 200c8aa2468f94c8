"""A [`SourceKV`] in one safetensors file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import SourceCacheError
from .geometry import KVGeometry
from .identity import ModelIdentity


if TYPE_CHECKING:
    from .source import SourceKV

SOURCE_FORMAT = "hf-kvtransfer-source-kv-1"


def write_source(source: "SourceKV", path: str | Path) -> None:
    """Write everything that a source's constructor takes."""
    tensors = {f"features.{i}": states.contiguous() for i, states in enumerate(source.features) if states is not None}
    for name in ("input_ids", "attention_mask", "position_ids", "spans", "token_losses"):
        if getattr(source, name) is not None:
            tensors[name] = getattr(source, name).contiguous()
    metadata = {
        "format": SOURCE_FORMAT,
        "geometry": json.dumps(source.geometry.to_dict()),
        "text": json.dumps(source.text),
        "identity": json.dumps(source.identity.to_dict()),
        "cache_policy": json.dumps(source.cache_policy),
    }
    save_file(tensors, path, metadata=metadata)


def read_source(path: str | Path, device: str | torch.device) -> dict[str, Any]:
    """
    What a source's constructor takes, as [`write_source`] wrote it.

    Raises:
        `SourceCacheError`: the file is missing, damaged or of another format.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != SOURCE_FORMAT:
                raise SourceCacheError(f"{path} is not a saved SourceKV (format {metadata.get('format')!r}).")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        geometry, text = KVGeometry.from_dict(json.loads(metadata["geometry"])), json.loads(metadata["text"])
        features = [None if layer is None else tensors[f"features.{i}"] for i, layer in enumerate(geometry.layers)]
        found = {
            "features": features,
            "geometry": geometry,
            **{name: tensors[name].cpu() for name in ("input_ids", "attention_mask", "position_ids")},
            "identity": ModelIdentity.from_dict(json.loads(metadata["identity"])),
            "text": text,
            "spans": None if text is None else tensors["spans"].cpu(),
            "token_losses": tensors["token_losses"].cpu() if "token_losses" in tensors else None,
            "cache_policy": json.loads(metadata["cache_policy"]),
        }
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SourceCacheError(f"{path} cannot be read as a saved SourceKV: {error!r}. Save it again.") from error
    for layer_idx, states in enumerate(features):
        if states is not None and states.shape != (*found["input_ids"].shape, geometry.num_features(layer_idx)):
            raise SourceCacheError(f"{path}: layer {layer_idx} has shape {tuple(states.shape)}. Save it again.")
    return found
