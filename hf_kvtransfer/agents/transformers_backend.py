"""The models of a dialogue in this process, each with its own cache."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import TranslatedCache
from ..errors import KVTransferError, UnknownModelError
from ..fidelity.chat import Message, render_turns
from ..fidelity.gate import FidelityGate
from ..fidelity.prompts import PromptEncoder
from ..generation import generate
from ..guarded_cache import GuardedCache
from ..mapper import KVMapper
from ..policy import TransferPolicy
from ..source import SourceKV
from .protocols import CacheHandle, CacheUse


class TransformersBackend:
    """
    An [`AgentBackend`] for transformers models.

    A model that has been asked before goes on from its own cache, and reads what was said since. One that is asked for
    the first time takes over the cache of the model that has read most, if there is a mapper for the two, and if the
    policy, the gate and the probe have nothing against it; else it reads the dialogue itself. Only what a model has
    read itself is translated, never a translation.

    Args:
        models (`Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]`):
            Each model and its tokenizer, by the name that routers call it.
        mappers (`Mapping[tuple[str, str], KVMapper | str | Path]`, *optional*):
            By names of source and target. Without any each model reads everything itself.
        gate ([`FidelityGate`], *optional*):
            What is asked of mappers' evidence.
        policies (`Mapping[tuple[str, str], TransferPolicy]`, *optional*):
            By names of source and target. Without one any handoff is worth it.
        generation:
            For [`~transformers.GenerationMixin.generate`], such as `max_new_tokens` and `do_sample`.

    Raises:
        [`UnknownModelError`]: a mapper or a policy is for a name that `models` does not have.
        [`MapperFormatError`]: a mapper cannot be loaded.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        mappers: Mapping[tuple[str, str], KVMapper | str | Path] | None = None,
        *,
        gate: FidelityGate | None = None,
        policies: Mapping[tuple[str, str], TransferPolicy] | None = None,
        **generation: Any,
    ):
        self._models, self._gate, self._policies = dict(models), gate, dict(policies or {})
        for pair in [*(mappers or {}), *self._policies]:
            for name in pair:
                self._model(name)
        self._mappers = {
            pair: mapper
            if isinstance(mapper, KVMapper)
            else KVMapper.from_pretrained(mapper, dtype=self._model(pair[1]).dtype)
            for pair, mapper in (mappers or {}).items()
        }
        self._encoders = {name: PromptEncoder(tokenizer) for name, (_, tokenizer) in self._models.items()}
        self._generation = generation
        self._handles: dict[str, CacheHandle] = {}

    @property
    def models(self) -> list[str]:
        """Their names."""
        return list(self._models)

    @property
    def handles(self) -> dict[str, CacheHandle]:
        """The caches that there are, by model."""
        return dict(self._handles)

    def reset(self) -> None:
        """Drop all caches."""
        self._handles.clear()

    def tokens(self, model: str, messages: Sequence[Message]) -> list[int]:
        """What a model reads before it replies: the dialogue in its chat template, or plainly if it has none."""
        self._model(model)
        reply: Message = {"role": "assistant", "content": ""}
        ((context, _),) = render_turns(self._models[model][1], [*messages, reply], [len(messages)])
        return self._encoders[model].encode(context)[0]

    def text(self, model: str, output_ids: Sequence[int]) -> str:
        """What a model has written, without special tokens and white space around it."""
        self._model(model)
        written = self._models[model][1].decode(list(output_ids), skip_special_tokens=True)
        return str(written).strip()

    def transfer(self, model: str, input_ids: Sequence[int]) -> CacheUse:
        """
        Bring a model's cache as far along a prompt as it gets without the model.

        Args:
            model (`str`):
                Its name.
            input_ids (`Sequence[int]`):
                The prompt, as [`TransformersBackend.tokens`] gives it.

        Returns:
            [`CacheUse`]

        Raises:
            [`UnknownModelError`]: there is no such model.
        """
        self._model(model)
        inputs = _inputs(input_ids)
        if (held := self._keep_own(model, inputs)) > 0:
            return CacheUse(held, 0, len(input_ids) - held)
        source = self._best_source(model)
        cache = None if source is None else self._translate(source, model, inputs)
        reasons: tuple[str, ...] = ()
        if cache is not None and cache.report.outcome == "translated":
            cache.prepare(inputs)
            translated = cache.report.translated_tokens
            if cache.is_translation:
                self._handles[model] = CacheHandle(cache.input_ids[0].tolist(), False, cache)
                return CacheUse(0, translated, len(input_ids) - translated, source)
        if cache is not None:
            reasons = cache.report.reasons
        self._handles[model] = CacheHandle([], True, self._empty(model))
        return CacheUse(0, 0, len(input_ids), source, reasons)

    def generate(self, model: str, input_ids: Sequence[int]) -> list[int]:
        """
        Let a model read the rest of a prompt and reply.

        If it fails, the model's cache is dropped: it may have been filled in part.

        Args:
            model (`str`):
                Its name.
            input_ids (`Sequence[int]`):
                The prompt. What [`TransformersBackend.transfer`] has put into the cache is not read again.

        Returns:
            `list[int]`: The ids that it has written.

        Raises:
            [`UnknownModelError`]: there is no such model.
        """
        target = self._model(model)
        handle = self._handles.pop(model, None) or CacheHandle([], True, self._empty(model))
        inputs = {name: tensor.to(target.device) for name, tensor in _inputs(input_ids).items()}
        sequences = generate(target, inputs, handle.cache, **self._generation)[:1]
        self._handles[model] = CacheHandle(handle.cache.input_ids[0].tolist(), handle.is_native, handle.cache)
        return sequences[0, len(input_ids) :].tolist()

    def _model(self, name: str) -> PreTrainedModel:
        if name not in self._models:
            raise UnknownModelError(f"There is no model {name!r}, there are {', '.join(sorted(self._models))}.")
        return self._models[name][0]

    def _empty(self, model: str) -> GuardedCache:
        cache = GuardedCache(self._model(model))
        cache.activate_past_recording()  # another model may take it over, also what a window has passed
        return cache

    def _keep_own(self, model: str, inputs: dict[str, torch.Tensor]) -> int:
        """Tokens of a prompt that a model's own cache holds. It is cut to them, or dropped if there are none."""
        handle = self._handles.pop(model, None)
        if handle is None:
            return 0
        try:
            handle.cache.prepare(inputs)
        except KVTransferError:  # nothing in common, and it cannot be cut
            return 0
        held = int(handle.cache.get_seq_length())
        if held:
            self._handles[model] = CacheHandle(handle.cache.input_ids[0].tolist(), handle.is_native, handle.cache)
        return held

    def _best_source(self, target: str) -> str | None:
        """Who has read most itself, of those that there is a mapper from."""
        names = [
            name for name, handle in self._handles.items() if handle.is_native and (name, target) in self._mappers
        ]
        return max(names, key=lambda name: len(self._handles[name].input_ids), default=None)

    def _translate(self, source: str, target: str, inputs: dict[str, torch.Tensor]) -> TranslatedCache:
        handle, (source_model, source_tokenizer) = self._handles[source], self._models[source]
        source_kv = SourceKV.from_cache(
            handle.cache, source_model, torch.tensor([handle.input_ids]), tokenizer=source_tokenizer
        )
        return TranslatedCache(
            source_kv,
            self._mappers[source, target],
            self._models[target][0],
            target_tokenizer=self._models[target][1],
            input_ids=inputs["input_ids"],
            gate=self._gate,
            policy=self._policies.get((source, target)),
        )


def _inputs(input_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    prompt = torch.tensor([list(input_ids)])
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
