"""Is this the model that a mapper was fitted for and measured on?"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compat import public_name
from ..geometry import KVGeometry
from ..nested import leaves
from ..rotary import Rotary
from .state import model_state
from .tensors import ModelTensors
from .tokenizer import tokenizer_fingerprint
from .weights import Samples, TensorSample, compare_samples, sample_tensors, sample_weights


# Also says where the samples are taken: it changes when these places do.
IDENTITY_FORMAT = "hf-kvtransfer-identity-1"

# The samples of each model, and the state in which they were taken.
_SAMPLED: WeakKeyDictionary[PreTrainedModel, tuple[tuple, tuple[Samples, Samples, dict[str, Samples]]]]
_SAMPLED = WeakKeyDictionary()

# Frequencies are computed when a model is loaded, and not by each device to the same last bit.
_ROTARY_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """What distinguishes a model from the one that something is known about.

    Args:
        part (`str`):
            `"tokenizer"`, `"weights"`, `"adapters"`, `"rotary"` or `"geometry"`.
        status (`str`):
            `"changed"`, or `"unverified"` where a comparison is impossible, as of quantised with other weights.
        detail (`str`):
            Which ones, for people: `"model.norm.weight and 4 others differ"`.
    """

    part: str
    status: str
    detail: str


@dataclass(frozen=True)
class ModelIdentity:
    """What makes a model the one it is, and its tokenizer, whatever files, devices and dtypes they are in.

    Args:
        name (`str`):
            For messages. It is never compared.
        tokenizer (`str`, *optional*):
            [`tokenizer_fingerprint`] of the tokenizer, if it was given.
        geometry ([`KVGeometry`]):
            What the model caches.
        rope_parameters (`dict`, *optional*):
            Those of the config.
        rotary (`Mapping[str, TensorSample]`):
            Samples of the buffers of the live rotary modules.
        weights (`Mapping[str, TensorSample]`):
            Samples of all parameters, without adapters.
        adapters (`dict[str, Mapping[str, TensorSample]]`):
            Samples of the active adapters, by name.
    """

    name: str
    tokenizer: str | None
    geometry: KVGeometry
    rope_parameters: dict | None
    rotary: Samples
    weights: Samples
    adapters: dict[str, Samples]

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> "ModelIdentity":
        """
        Reads a few elements of each parameter, anew at each call: weights can change in place without a trace. Only
        what accelerate keeps on disk is read once for each model, and the rest again if its [`model_state`] is known
        and is another one.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                A live model. The first time, it runs on 8 tokens.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Its tokenizer. Without it that part is not compared.

        Raises:
            [`UnsupportedModelError`]: if it is not a model whose cache can be translated, or has no data.
            [`TokenizerMismatchError`]: if the tokenizer cannot be compared with another.
        """
        # Both run the model if it has not run before, which can change how quantised weights are stored.
        geometry, rotary = KVGeometry.from_model(model), Rotary.from_model(model)
        rope_parameters = getattr(model.config.get_text_config(), "rope_parameters", None)
        return cls(
            public_name(model),
            None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            geometry,
            json.loads(json.dumps(rope_parameters, default=str)),
            *_sample(model, rotary),
        )

    def differences(self, found: "ModelIdentity") -> list[Difference]:
        """
        What has changed from this model, about which something is known, to another, the one at hand.

        Args:
            found ([`ModelIdentity`]):
                The model at hand. A tokenizer is compared only where both sides have one.

        Returns:
            `list[Difference]`: empty if they are the same.
        """
        return [Difference(*difference) for difference in self._differences(found)]

    def _differences(self, found: "ModelIdentity") -> Iterator[tuple[str, str, str]]:
        if None not in (self.tokenizer, found.tokenizer) and self.tokenizer != found.tokenizer:
            yield "tokenizer", "changed", f"its fingerprint is {found.tokenizer}, not {self.tokenizer}"
        for status, detail in compare_samples(self.weights, found.weights):
            yield "weights", status, detail
        for name in sorted(self.adapters.keys() | found.adapters.keys()):
            if name not in found.adapters:
                yield "adapters", "changed", f"adapter {name} is not active"
            elif name not in self.adapters:
                yield "adapters", "changed", f"adapter {name} is active"
            else:
                for status, detail in compare_samples(self.adapters[name], found.adapters[name]):
                    yield "adapters", status, f"adapter {name}: {detail}"
        expected, given = leaves(self.rope_parameters), leaves(found.rope_parameters)
        changed = [key for key in expected | given if expected.get(key) != given.get(key)]
        if changed:
            values = ", ".join(f"{key} is {given.get(key)}, not {expected.get(key)}" for key in changed)
            yield "rotary", "changed", f"of the config's rope_parameters {values}"
        for status, detail in compare_samples(self.rotary, found.rotary, _ROTARY_TOLERANCE):
            yield "rotary", status, detail
        if self.geometry != found.geometry:
            yield "geometry", "changed", f"it caches {found.geometry.describe()}, not {self.geometry.describe()}"

    def to_dict(self) -> dict:
        """
        Returns:
            `dict`: JSON-friendly.
        """
        return {
            "format": IDENTITY_FORMAT,
            "name": self.name,
            "tokenizer": self.tokenizer,
            "geometry": self.geometry.to_dict(),
            "rope_parameters": self.rope_parameters,
            "rotary": _samples_to_dict(self.rotary),
            "weights": _samples_to_dict(self.weights),
            "adapters": {name: _samples_to_dict(adapter) for name, adapter in self.adapters.items()},
        }

    @classmethod
    def from_dict(cls, identity: dict) -> "ModelIdentity":
        """The inverse of [`~ModelIdentity.to_dict`].

        Raises:
            `ValueError`: if it is damaged, incomplete or of another format.
        """
        if not isinstance(identity, dict) or identity.get("format") != IDENTITY_FORMAT:
            raise ValueError(f"The identity of a model has the format {IDENTITY_FORMAT!r}, not {identity!r:.200}")
        names = {field.name for field in dataclasses.fields(cls)}
        if names != identity.keys() - {"format"}:
            raise ValueError(f"The identity of a model has {sorted(names)}, not {sorted(identity.keys())}.")
        kinds = {"name": str, "tokenizer": str | None, "rope_parameters": dict | None, "adapters": dict}
        for name, kind in kinds.items():
            if not isinstance(identity[name], kind):
                raise ValueError(f"`{name}` of the identity of a model is damaged: {identity[name]!r:.200}")
        return cls(
            identity["name"],
            identity["tokenizer"],
            KVGeometry.from_dict(identity["geometry"]),
            identity["rope_parameters"],
            _samples_from_dict(identity["rotary"]),
            _samples_from_dict(identity["weights"]),
            {name: _samples_from_dict(adapter) for name, adapter in identity["adapters"].items()},
        )


def _sample(model: PreTrainedModel, rotary: Rotary) -> tuple[Samples, Samples, dict[str, Samples]]:
    """What [`ModelIdentity`] holds of a model's rotary modules, weights and adapters."""
    state = model_state(model)
    known = _SAMPLED.get(model)
    if known is not None and state is not None and known[0] == state:
        return known[1]
    tensors = ModelTensors.from_model(model, [call.module for call in rotary.calls])
    frequencies = tensors.rotary
    if rotary.depends_on_length:
        # Exchanged by each call that is longer or shorter than the ones before; the original is kept beside it.
        frequencies = {name: tensor for name, tensor in frequencies.items() if "original" in name.split(".")[-1]}
    samples: tuple[Samples, Samples, dict[str, Samples]] = (
        sample_tensors(frequencies),
        sample_weights(tensors),
        {name: sample_tensors(adapter) for name, adapter in tensors.adapters.items() if adapter},
    )
    if state is not None:
        _SAMPLED[model] = state, samples
    return samples


def _samples_to_dict(samples: Samples) -> dict:
    return {name: sample.to_list() for name, sample in samples.items()}


def _samples_from_dict(samples: dict) -> Samples:
    if not isinstance(samples, dict):
        raise ValueError(f"The samples of a model are damaged: {samples!r:.200}.")
    return {name: TensorSample.from_list(sample) for name, sample in samples.items()}
