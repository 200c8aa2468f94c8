"""What a pair of models costs on this machine, measured once and kept on disk."""

import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..compat import input_device, unwrap
from ..home import home_folder
from ..mapper import KVMapper
from ..question_attention import MAX_QUESTION, MIN_QUESTION
from ..whole_files import whole_file
from .time_model import TimeModel


# Changes with what is measured, and how.
COSTS_FORMAT = "hf-kvtransfer-costs-2"


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """
    What a handoff, and what it replaces, cost on one machine. See [`measure_costs`].

    Args:
        prefill ([`TimeModel`]):
            Seconds until the target's first logits if it reads a context of so many of its tokens itself.
        handoff ([`TimeModel`]):
            The same from a translated cache, the source's cache in hand: binding, probe, and all layers.
        source_prefill ([`TimeModel`]):
            Seconds for which the source reads a context of so many *target* tokens.
        measured (`list[dict]`):
            What these were fitted on, see [`time_lengths`].
        reference_seconds (`float`):
            What a fixed computation took on the target's device meanwhile, see [`LoadMeter`].
        device (`str`, *optional*):
            The target's device. `None` if it is spread over several.
        cache_bytes_per_token (`int`):
            Of the target.
        largest_layer_bytes_per_token (`int`):
            Of the target's largest layer: a handoff takes no more than two of them beside the cache.
        first_layers (`float`):
            Share of the target's layers with which it reads all of a context to choose what it reads again (`effort`).
    """

    prefill: TimeModel
    handoff: TimeModel
    source_prefill: TimeModel
    measured: list[dict[str, float]]
    reference_seconds: float
    device: str | None
    cache_bytes_per_token: int
    largest_layer_bytes_per_token: int
    first_layers: float

    def handoff_with(self, effort: float, question_tokens: int = 0, batch_size: int = 1) -> TimeModel:
        """
        What a handoff takes in which the target reads a share of the tokens again, see [`TranslatedCache`].

        Args:
            effort (`float`):
                That share. A token that is read again counts as one of a prefill, but that it has a mask of its own:
                attention computes the tokens behind it, too, which a prefill leaves out.
            question_tokens (`int`, *optional*, defaults to 0):
                Known behind the context. They are read once more, to see what they attend to.
            batch_size (`int`, *optional*, defaults to 1):
                Number of rows that have such questions.
        """
        prefill = self.prefill
        if not effort:
            return self.handoff
        if effort == 1:
            return self.handoff + prefill
        share, pairs = effort + self.first_layers, 2 * effort + self.first_layers
        again = TimeModel(prefill.constant, share * prefill.per_token, pairs * prefill.per_token_squared)
        if question_tokens < MIN_QUESTION:
            return self.handoff + again
        read = min(question_tokens, MAX_QUESTION)
        question = TimeModel(prefill.seconds(read, batch_size), 2 * read * prefill.per_token_squared)
        return self.handoff + again + question

    def handoff_bytes(self, tokens: int, batch_size: int = 1) -> int:
        """Bytes that a handoff allocates on the target's side."""
        return tokens * batch_size * (self.cache_bytes_per_token + 2 * self.largest_layer_bytes_per_token)

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write them, at once or not at all, with what they are `about`."""
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps({"about": about, "costs": dataclasses.asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, about: dict[str, Any]) -> "MeasuredCosts | None":
        """What was saved of the same things, `None` if nothing was, or nothing that can be read."""
        try:
            found = json.loads(path.read_text())
            if found["about"] != about:
                return None
            costs = found["costs"]
            models = {name: TimeModel(**costs[name]) for name in ("prefill", "handoff", "source_prefill")}
            return cls(**costs | models)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # they are measured again


def costs_file(about: dict[str, Any]) -> Path:
    """Where the costs of something are kept, `$HF_KVTRANSFER_HOME/costs/<digest>.json`."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return home_folder() / "costs" / f"{digest[:32]}.json"


def what_decides_costs(
    mapper: KVMapper, source: PreTrainedModel, target: PreTrainedModel, **settings: Any
) -> dict[str, Any]:
    """
    All that costs depend on, in JSON: the machine, the shapes of the models and of the mapper, and the settings of the
    measurement. Not the values of weights, which cost the same whatever they are.
    """
    probe = mapper.evidence and mapper.evidence.probe
    described = {
        "format": COSTS_FORMAT,
        "machine": [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads()],
        "versions": [torch.__version__, transformers.__version__],
        "source": _model(source),
        "target": _model(target),
        "mapper": [mapper.config.layers, mapper.config.token_features, mapper.config.sink_tokens],
        "mapper's weights": [mapper.config.storage, str(mapper.dtype)],
        "probe": probe and probe["tokens"],
        "settings": settings,
    }
    return json.loads(json.dumps(described, default=str))


def _model(model: PreTrainedModel) -> dict[str, Any]:
    config = unwrap(model).config
    device = input_device(model)
    return {
        "class": type(unwrap(model)).__name__,
        "config": {name: value for name, value in config.to_dict().items() if name != "_name_or_path"},
        "attention": config._attn_implementation,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype),
        "devices": sorted({str(place) for place in getattr(model, "hf_device_map", {"": device}).values()}),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
