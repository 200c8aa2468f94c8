"""The models of a dialogue in this process, each with its own cache."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversation import Conversation
from ..conversation.prompt import render_prompt
from ..errors import UnknownModelError
from ..fidelity.chat import Message
from ..mapper import KVMapper, mapper_for
from .protocols import AgentReply, CacheHandle, CacheUse


class TransformersBackend:
    """
    An [`AgentBackend`] for transformers models, on a [`Conversation`].

    Args:
        models (`Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]`):
            Each model and its tokenizer, by the name that routers call it.
        mappers (`Mapping[tuple[str, str], KVMapper | str | Path]`, *optional*):
            By names of source and target. Without any each model reads everything itself.
        conversation (`Mapping[str, Any]`, *optional*):
            Further arguments of [`Conversation`], such as `gate` and `policies`.
        generation:
            For [`~transformers.GenerationMixin.generate`], such as `max_new_tokens` and `do_sample`.

    Raises:
        [`UnknownModelError`]: a mapper is for a name that `models` does not have.
        [`MapperFormatError`]: a mapper cannot be loaded.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        mappers: Mapping[tuple[str, str], KVMapper | str | Path] | None = None,
        *,
        conversation: Mapping[str, Any] | None = None,
        **generation: Any,
    ):
        self._models, self._mappers = dict(models), dict(mappers or {})
        self._options, self._generation = dict(conversation or {}), generation
        self.reset()  # checks the names
        for (source, target), mapper in self._mappers.items():
            self._mappers[source, target] = mapper_for(mapper, self._models[target][0])  # once, not at each handoff
        self.reset()

    @property
    def models(self) -> list[str]:
        """Their names."""
        return list(self._models)

    @property
    def handles(self) -> dict[str, CacheHandle]:
        """The caches that there are, by model."""
        readers = {name: self._conversation.readers(name) for name in self._models}
        return {name: CacheHandle(found) for name, found in readers.items() if found}

    def reset(self) -> None:
        """Begin another dialogue: drop all caches."""
        self._conversation = Conversation(self._models, self._mappers, **self._options)

    def tokens(self, model: str, messages: Sequence[Message]) -> list[int]:
        """What a model reads before it replies: the dialogue in its chat template, or plainly if it has none."""
        if model not in self._models:
            raise UnknownModelError(f"There is no model {model!r}, there are {', '.join(sorted(self._models))}.")
        return render_prompt(self._models[model][1], messages).ids

    def generate(self, model: str, messages: Sequence[Message]) -> AgentReply:
        """
        Hand a model what it lacks of a dialogue, and let it reply. If that fails, all caches are as they were.

        Args:
            model (`str`):
                Its name.
            messages (`Sequence[dict[str, str]]`):
                The dialogue. What was read of it before is not read again, whatever has been changed behind that.

        Returns:
            [`AgentReply`]

        Raises:
            [`UnknownModelError`]: there is no such model.
            [`ConversationError`]: there is nothing to reply to, or `generate` is asked for several replies.
        """
        self._conversation.messages[:] = [dict(message) for message in messages]
        reply = self._conversation.reply(model, **self._generation)
        sequences = getattr(reply.output, "sequences", reply.output)
        report = reply.report
        output_ids = sequences[0].tolist()[sequences.shape[1] - report.reply_tokens :]
        use = CacheUse(report.kept_tokens, dict(report.translated_tokens), report.native_tokens, report.reasons)
        return AgentReply(output_ids, reply.text, use)
