"""Several models, one conversation: each reads only what no other has read for it."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..admission import Admission
from ..cache import TranslatedCache
from ..compat import read_into_cache, token_losses
from ..effort import Effort, check_effort
from ..errors import ConversationError, UnknownModelError
from ..fidelity.chat import Message
from ..fidelity.gate import FidelityGate
from ..fidelity.rows import parse_message
from ..generation import generate
from ..identity import ModelIdentity
from ..mapper import KVMapper
from ..policy import TransferPolicy
from ..segments.segment import Segment
from .files import load_logs, save_logs
from .handoff import Handoff, hold_all, sources_of
from .log import ModelLog
from .plan import Run, plan_runs
from .prompt import ReadText, encode_reply, render_prompt
from .turn import Reply, TurnReport


Members = Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]
Mappers = Mapping[tuple[str, str], KVMapper | str | Path]


class Conversation:
    """
    A dialogue in which any of several models gives the next reply.

    Each model keeps its own cache. Before a reply it is handed what it lacks: what another model has read itself is
    translated, once and never from a translation; its own cache, the templates around messages, and what nobody has
    read are its own. A call that fails leaves the conversation as it was before it.

    Args:
        models (`dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]`):
            The models and their tokenizers, by names of your own.
        mappers (`dict[tuple[str, str], KVMapper | str | Path]`, *optional*):
            For a source and a target the mapper, or the folder or Hub id of one. A model reads itself what it has no
            mapper for.
        gate ([`FidelityGate`], *optional*):
            What is asked of the mappers' evidence.
        probe_tokens (`int`, *optional*):
            As of [`TranslatedCache`].
        effort (`float` or `"auto"`, *optional*, defaults to 0):
            As of [`TranslatedCache`]: the share of what is translated in a turn that the model reads again.
        min_tokens (`int`, *optional*, defaults to 16):
            Fewer tokens in a row are read rather than translated: to read a few takes hardly longer than to read one.
        policies (`dict[tuple[str, str], TransferPolicy]`, *optional*):
            For a source and a target who decides whether tokens in a row are worth a handoff. By default any are that
            are not too few.
        max_bytes (`int`, *optional*):
            How much all caches may hold after a turn. Beyond that those of the models that have not replied for
            longest are given up: such a model begins anew, from what others have read.

    Attributes:
        messages (`list[dict[str, str]]`):
            What was said, `role` and `content`. It may be changed: what was read before the change stays in use.
        turns (`list[TurnReport]`):
            What became of each turn.

    Raises:
        `UnknownModelError`: a mapper or a policy is for a model that is not there.
        `ValueError`: `effort` is no share.

    Example:

    ```python
    >>> models = {"small": (small, small_tokenizer), "large": (large, large_tokenizer)}
    >>> conversation = Conversation(models, {("small", "large"): "org/small-to-large"})
    >>> conversation.reply("small", "What is silt?", max_new_tokens=64).text
    >>> print(conversation.reply("large", "And where does it come from?", max_new_tokens=64).report)
    ```
    """

    def __init__(
        self,
        models: Members,
        mappers: Mappers | None = None,
        *,
        gate: FidelityGate | None = None,
        probe_tokens: int | None = None,
        effort: Effort = 0.0,
        min_tokens: int = 16,
        policies: Mapping[tuple[str, str], TransferPolicy] | None = None,
        max_bytes: int | None = None,
    ):
        check_effort(effort, may_be_auto=True)
        self.models, self.mappers, self.policies = dict(models), dict(mappers or {}), dict(policies or {})
        for pair in [*self.mappers, *self.policies]:
            for name in pair:
                self._member(name)
        self.gate, self.probe_tokens, self.effort = gate, probe_tokens, effort
        self.min_tokens, self.max_bytes = min_tokens, max_bytes
        self.messages: list[Message] = []
        self.turns: list[TurnReport] = []
        self._logs: dict[str, ModelLog] = {}
        self._num_turns = 0

    def reply(self, model: str, message: str | Message | None = None, **options) -> Reply:
        """
        Let a model reply.

        Args:
            model (`str`):
                Its name.
            message (`str` or `dict[str, str]`, *optional*):
                What the user says first, or a message with its `role`. `None` to reply to what was said.
            options:
                For [`~transformers.GenerationMixin.generate`].

        Returns:
            [`Reply`]

        Raises:
            `UnknownModelError`: there is no such model.
            `ConversationError`: there is nothing to reply to, or `generate` is asked for several replies.
            `EvaluationDataError`: the model's chat template does not take the messages.
        """
        output = None

        def answer(prompt: ReadText, cache: TranslatedCache) -> list[int]:
            nonlocal output
            reader, _ = self.models[model]
            ids = torch.tensor([prompt.ids], device=reader.device)
            output = generate(reader, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache, **options)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            if len(sequences) != 1:
                raise ConversationError(f"`generate` gave {len(sequences)} replies, a conversation goes on with one.")
            return sequences[0].tolist()

        text, report = self._take_turn(model, message, answer)
        return Reply(text, report, output)

    def read_reply(self, model: str, message: str | Message | None, reply: str) -> Reply:
        """
        Let a model read a reply that is given, as if it were its own: to replay a dialogue, or to score one.

        Args:
            model (`str`), message (`str` or `dict[str, str]`, *optional*):
                As in [`~Conversation.reply`].
            reply (`str`):
                The reply.

        Returns:
            [`Reply`]: With the model's losses on the reply.

        Raises:
            As [`~Conversation.reply`].
        """
        losses: list[float] = []

        def answer(prompt: ReadText, cache: TranslatedCache) -> list[int]:
            reader, tokenizer = self.models[model]
            new = encode_reply(tokenizer, prompt, reply)
            ids, held = torch.tensor([prompt.ids + new]), int(cache.get_seq_length())
            positions = torch.arange(held, ids.shape[1])[None]
            logits = read_into_cache(reader, cache, ids[:, held:], num_logits=len(new) + 1, position_ids=positions)
            losses.extend(token_losses(logits[:, :-1], ids[:, -len(new) :].to(logits.device))[0].tolist())
            return ids[0].tolist()

        text, report = self._take_turn(model, message, answer)
        return Reply(text, report, losses=losses)

    def num_bytes(self) -> int:
        """Bytes of keys and values in all caches."""
        return sum(log.num_bytes() for log in self._logs.values())

    def readers(self, model: str) -> list[str]:
        """Who has read each of the tokens that a model's cache holds; empty if it has none."""
        self._member(model)
        return list(self._logs[model].readers) if model in self._logs else []

    def forget(self, model: str) -> None:
        """Give up a model's cache. It begins anew, from what others have read."""
        self._member(model)
        self._logs.pop(model, None)

    def save(self, folder: str | Path) -> None:
        """
        Write the conversation: what was said and read as JSON, and the caches as safetensors. Models, mappers and
        settings are not part of it.
        """
        save_logs(Path(folder), self.messages, self._logs, self._num_turns)

    @classmethod
    def load(cls, folder: str | Path, models: Members, mappers: Mappers | None = None, **options) -> "Conversation":
        """
        Read what [`~Conversation.save`] wrote. A model other than the one that was saved begins anew.

        Args:
            folder (`str` or `Path`):
                The folder.
            models, mappers, options:
                As of [`Conversation`].

        Raises:
            `ConversationError`: a file is missing, damaged or of another format.
        """
        conversation = cls(models, mappers, **options)
        conversation.messages, conversation._logs, conversation._num_turns = load_logs(Path(folder), models)
        return conversation

    def _member(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if name not in self.models:
            raise UnknownModelError(f"There is no model {name!r} in the conversation, only {sorted(self.models)}.")
        return self.models[name]

    def _take_turn(
        self,
        name: str,
        message: str | Message | None,
        answer: Callable[[ReadText, TranslatedCache], list[int]],
    ) -> tuple[str, TurnReport]:
        """Hand over, let the model answer, and only then note what has happened."""
        model, tokenizer = self._member(name)
        messages = [*self.messages]
        if message is not None:
            message = {"role": "user", "content": message} if isinstance(message, str) else message
            messages.append(parse_message(len(messages) + 1, message))
        if not messages or messages[-1]["role"] == "assistant":
            raise ConversationError("There is nothing to reply to: pass a `message`.")
        reasons: list[str] = []
        identity = self._identify(name, reasons)
        log = self._logs.get(name)
        prompt = render_prompt(tokenizer, messages, None if log is None else log.read)
        handoff = self._hand_over(name, prompt, reasons)
        ids = answer(prompt, handoff.cache)
        cache = hold_all(model, handoff.cache, len(prompt.ids), ids)
        read = prompt.with_reply(tokenizer, ids)
        readers = handoff.readers(name, cache.translated_mask.any(0).tolist(), len(ids))

        reply = read.messages[-1]
        translated = readers[handoff.kept : len(prompt.ids)]
        counts = {other: translated.count(other) for other in dict.fromkeys(translated) if other != name}
        if handoff.runs:
            reasons += handoff.cache.report.reasons
        self._num_turns += 1
        self.messages[:] = [*messages, reply]
        self._logs[name] = ModelLog(read, readers, cache, identity, self._num_turns)
        if not self._logs[name].is_complete(model):
            del self._logs[name]
            reasons.append(f"the cache of {name} has dropped tokens, as of windows in assisted decoding")
        report = TurnReport(
            name,
            handoff.kept,
            counts,
            len(prompt.ids) - handoff.kept - sum(counts.values()),
            len(ids) - len(prompt.ids),
            tuple(reasons),
            self._evict(),
            handoff.cache.report if handoff.runs else None,
        )
        self.turns.append(report)
        return reply["content"], report

    def _identify(self, name: str, reasons: list[str]) -> ModelIdentity:
        """Which model this is now. What another one has read under this name is given up."""
        identity = ModelIdentity.from_model(*self.models[name])
        if name in self._logs and (differences := self._logs[name].identity.differences(identity)):
            del self._logs[name]
            found = "; ".join(f"{part.part} {part.status} ({part.detail})" for part in differences)
            reasons.append(f"{name} is another model than the one that has read the conversation: {found}")
        return identity

    def _hand_over(self, name: str, prompt: ReadText, reasons: list[str]) -> Handoff:
        """What a model is to continue from: its own cache, and behind it what others have read."""
        model, tokenizer = self.models[name]
        log = self._logs.get(name)
        kept = 0 if log is None else log.common_prefix(prompt.ids)
        runs = self._plan(name, prompt, kept, reasons)
        segments, done, used = [], kept, []
        for run, kv in sources_of(runs, self._logs, self.models, reasons):
            if run.start > done:
                segments.append(Segment(done, run.start))
            segments.append(Segment(run.start, run.stop, kv, self.mappers[run.model, name]))
            used.append(run)
            done = run.stop
        if kept and not segments:
            segments.append(Segment(kept, kept + 1))  # says how much of the prefix is kept
        cache = TranslatedCache.from_segments(
            segments,
            model,
            torch.tensor([prompt.ids]),
            prefix=log.cache if kept else None,
            target_tokenizer=tokenizer,
            probe_tokens=self.probe_tokens,
            effort=self.effort,
            gate=self.gate,
        )
        cache.activate_past_recording()  # so that it can be continued from any token, and be a source
        return Handoff(cache, kept, used, log)

    def _plan(self, name: str, prompt: ReadText, kept: int, reasons: list[str]) -> list[Run]:
        """What others have read of a prompt, who are still the models that they were."""
        others = sorted((other for other in self._logs if other != name), key=lambda other: -self._logs[other].turn)
        for other in others:
            alone = {other: self._logs[other]}
            if (other, name) not in self.mappers and plan_runs(prompt, kept, alone, self.min_tokens):
                reasons.append(f"there is no mapper from {other} to {name}")
        identified: set[str] = set()
        while True:
            logs = {other: self._logs[other] for other in others if other in self._logs}
            logs = {other: log for other, log in logs.items() if (other, name) in self.mappers}
            runs = plan_runs(prompt, kept, logs, self.min_tokens)
            new = {run.model for run in runs} - identified
            if not new:
                return [run for run in runs if self._is_worth_it(run, name, prompt, reasons)]
            for other in sorted(new):
                self._identify(other, reasons)
            identified |= new

    def _is_worth_it(self, run: Run, name: str, prompt: ReadText, reasons: list[str]) -> bool:
        policy = self.policies.get((run.model, name))
        if policy is None:
            return True
        admission = Admission(self.gate, *self.models[name], None, None, None, self.effort)
        some = functools.partial(self._logs[run.model].source_kv, *self.models[run.model], run.first, run.first + 1)
        effort = admission.foresee_effort(self.mappers[run.model, name], some)
        decision = policy.decide(run.stop - run.start, 1, effort, len(prompt.ids) - run.stop)
        if decision.choice == "transfer":
            return True
        reasons.append(f"tokens {run.start} to {run.stop} are not worth a handoff: {decision.reason}")
        return False

    def _evict(self) -> tuple[str, ...]:
        """Give up the caches that have not been used for longest, until the others are small enough."""
        evicted = []
        while self.max_bytes is not None and self._logs and self.num_bytes() > self.max_bytes:
            evicted.append(min(self._logs, key=lambda name: self._logs[name].turn))
            del self._logs[evicted[-1]]
        return tuple(evicted)
