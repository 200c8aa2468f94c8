"""Serve natively, and see on the side what a translated cache would have been worth on this very traffic."""

import dataclasses
import random
import threading
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..alignment.spans import character_spans
from ..mapper import KVMapper
from ..padding import unpad_rows
from .data import Passage
from .replay import Replay
from .results import ArmScore
from .shadow_log import ShadowLog, loggable, summarize_shadow_log


logger = logging.get_logger(__name__)

# Conversations whose turns are counted, the ones last served.
MAX_CONVERSATIONS = 10_000

_ARMS = ("native", "translated", "no_context")
# Below this difference, in nats per token, what is recovered of it in a single reply is noise.
_LEAST_GAP = 0.05
# Tensors that say nothing but which tokens the prompt has.
_TEXT_TENSORS = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "eos_token_id", "pad_token_id"}


@dataclasses.dataclass
class _Sampled:
    """A served prompt and its reply, as ids, and what of its line in the log is known."""

    line: dict[str, Any]
    prompt: torch.Tensor | None = None
    reply: torch.Tensor | None = None


class ShadowTransfer:
    """
    Serves with the target alone, and translates on the side, to measure a mapper on one's own traffic before using it.

    [`ShadowTransfer.generate`] is `target.generate`: the same output, the same random numbers. Of some requests it
    remembers the token ids. [`ShadowTransfer.drain`] lets the source read these prompts, and scores the reply that was
    served on the target's own prefill, on the translated cache and without the context.

    Each reply is a line of the log, with the `time` of the request; the `mapper`, `{"name", "digest"}`; the
    `conversation`, the number of the `turn` in it, and the `row` of the batch; `prompt_tokens` and `reply_tokens`;
    `arms`, an [`ArmScore`] of each, of sums over the reply's tokens; and `gap_recovered`, `None` where the
    context hardly helps. Where a comparison failed there is `error` instead of the last two. A line with
    `not_compared` counts sampled replies that were left out: `dropped` (for newer ones), `long`, `short` (a prompt of
    one token), `empty`, or `not_text`. Neither text nor token ids are logged, and of an error only its kind and place:
    its message, which may quote them, goes to this module's logger at level DEBUG.

    Args:
        mapper ([`KVMapper`]):
            Fitted for the pair.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models, in eval mode.
        log (`str` or `Path`):
            A JSON Lines file that is appended to.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed if the two models' tokenizers differ. The source then reads the text of the target's ids.
        rate (`float`, *optional*, defaults to 0.05):
            Share of requests that are remembered.
        max_tokens (`int`, *optional*, defaults to 4096):
            Longer prompts, together with their reply, are left out.
        max_pending (`int`, *optional*, defaults to 16):
            Prompts that are remembered at once. The oldest is dropped for a new one.
        seed (`int`, *optional*, defaults to 0):
            Decides which requests are remembered.

    Raises:
        `ValueError`: an argument is out of range, a model is in training mode, or the log cannot be written.
        `PairMismatchError`, `TokenizerMismatchError`: the mapper is not for these models and tokenizers.

    Example:

    ```python
    >>> with ShadowTransfer(mapper, source, target, log="shadow.jsonl", rate=0.05) as shadow:
    ...     output = shadow.generate(inputs, conversation="abc", max_new_tokens=64)  # whenever a request comes
    ...     shadow.drain()  # whenever there is none
    >>> shadow.summary()["figures"]["arms"]["translated"]["gap_recovered"]
    ```
    """

    def __init__(
        self,
        mapper: KVMapper,
        source: PreTrainedModel,
        target: PreTrainedModel,
        *,
        log: str | Path,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        rate: float = 0.05,
        max_tokens: int = 4096,
        max_pending: int = 16,
        seed: int = 0,
    ):
        if not 0 <= rate <= 1:
            raise ValueError(f"`rate` must lie between 0 and 1, got {rate}.")
        for name, number in (("max_tokens", max_tokens), ("max_pending", max_pending)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}.")
        self._replay = Replay(mapper, source, target, source_tokenizer, target_tokenizer)
        self._log = ShadowLog(log)
        self._mapper = {"name": mapper.name, "digest": mapper.digest()}
        self._one_vocabulary = mapper.config.source["tokenizer"] == mapper.config.target["tokenizer"]
        self._rate, self._max_tokens, self._max_pending = rate, max_tokens, max_pending
        # Its own, so that sampling goes on as without it.
        self._random = random.Random(seed)
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._pending: deque[_Sampled] = deque()
        self._not_compared: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._drain_lock = threading.Lock()

    def __enter__(self) -> "ShadowTransfer":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_) -> None:
        # Who interrupts a service does not want to wait.
        if error_type is None or issubclass(error_type, Exception):
            self.drain()

    def generate(
        self,
        inputs: Mapping[str, Any],
        *,
        conversation: str | Sequence[str] | None = None,
        **generate_kwargs,
    ) -> Any:
        """
        Serve a request.

        Args:
            inputs (`Mapping`):
                What the target's tokenizer returned.
            conversation (`str` or `list[str]`, *optional*):
                Which one this is the next turn of, for a batch also one for each row. It stands in the log.
            generate_kwargs:
                For the target's `generate`.

        Returns:
            What `target.generate(**inputs, **generate_kwargs)` does.
        """
        output = self._replay.target.generate(**inputs, **generate_kwargs)
        try:
            self._remember({**inputs, **generate_kwargs}, output, conversation)
        except Exception as error:
            self._hold(_Sampled({"time": _now(), "error": _describe(error)}))
        return output

    def drain(self) -> int:
        """
        Compare what is remembered. For when nothing is served: the target is in use, for about as long as both models
        need to read these prompts. What an interruption leaves is compared by the next call.

        Returns:
            `int`: The number of replies that were compared.
        """
        compared = 0
        with self._drain_lock, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            # Not more than there are now: requests may come in as fast as they are compared.
            for _ in range(len(self._pending)):
                with self._lock:
                    if not self._pending:
                        break
                    sampled = self._pending.popleft()
                line = sampled.line
                if sampled.prompt is not None:
                    line = line | self._compare(sampled.prompt.tolist(), sampled.reply.tolist())
                compared += self._write(line) and "arms" in line
            with self._lock:
                not_compared, self._not_compared = self._not_compared, Counter()
            if not_compared:
                self._write({"time": _now(), "not_compared": dict(not_compared)})
        return compared

    def summary(self) -> dict[str, Any]:
        """What the log says about this mapper so far, see [`summarize_shadow_log`]."""
        return summarize_shadow_log(self._log.path, self._mapper["digest"])

    def _remember(self, call: dict[str, Any], output: Any, conversation: str | Sequence[str] | None) -> None:
        given = conversation if isinstance(conversation, list | tuple) else [conversation]
        names = [None if name is None else str(name) for name in given]
        with self._lock:
            turns = {name: self._next_turn(name) for name in dict.fromkeys(names)}
            if self._random.random() >= self._rate:
                return
        tensors = {name for name, value in call.items() if isinstance(value, torch.Tensor)}
        if "input_ids" not in tensors or tensors - _TEXT_TENSORS:
            self._skip("not_text")
            return
        prompts, replies = self._rows(call, getattr(output, "sequences", output))
        if len(names) == 1:
            names *= len(prompts)
        if len(names) != len(prompts):
            raise ValueError(f"`conversation` has {len(names)} entries for {len(prompts)} rows.")
        for row, (name, prompt, reply) in enumerate(zip(names, prompts, replies, strict=True)):
            line = {"time": _now(), "conversation": name, "turn": turns[name], "row": row}
            line |= {"prompt_tokens": len(prompt), "reply_tokens": len(reply)}
            if not len(reply):
                self._skip("empty")
            elif len(prompt) < 2:
                self._skip("short")
            elif len(prompt) + len(reply) > self._max_tokens:
                self._skip("long")
            else:
                self._hold(_Sampled(line, prompt, reply))

    def _next_turn(self, name: str | None) -> int | None:
        if name is None:
            return None
        turn = self._turns.pop(name, 0) + 1
        self._turns[name] = turn
        if len(self._turns) > MAX_CONVERSATIONS:
            self._turns.popitem(last=False)
        return turn

    def _rows(self, call: dict[str, Any], sequences: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Ids of each prompt without padding, and of the first reply to it, on the CPU and independent of `call`."""
        input_ids, mask = call["input_ids"].cpu(), call.get("attention_mask")
        pad, eos = self._special_ids("pad_token_id", call), self._special_ids("eos_token_id", call)
        if mask is None and pad and pad[0] not in eos:
            mask = input_ids.ne(pad[0])  # as `generate` does
        prompts = unpad_rows(input_ids, None if mask is None else mask.cpu())
        stops = torch.tensor(pad + eos, dtype=torch.long)
        replies = []
        for sequence in sequences[:: len(sequences) // len(input_ids)].cpu():
            reply = sequence[input_ids.shape[1] :]
            ends = torch.isin(reply, stops).nonzero()
            replies.append(reply[: int(ends[0])].clone() if len(ends) else reply.clone())
        return prompts, replies

    def _special_ids(self, name: str, call: dict[str, Any]) -> list[int]:
        """The ids that this call of `generate` uses under a name."""
        ids = call.get(name)
        if name not in call:
            ids = getattr(call.get("generation_config"), name, None)
            if ids is None:
                ids = getattr(self._replay.target.generation_config, name)
        return [] if ids is None else torch.as_tensor(ids).flatten().tolist()

    def _skip(self, reason: str) -> None:
        with self._lock:
            self._not_compared[reason] += 1

    def _hold(self, sampled: _Sampled) -> None:
        with self._lock:
            if len(self._pending) == self._max_pending:
                self._pending.popleft()
                self._not_compared["dropped"] += 1
            self._pending.append(sampled)

    def _compare(self, prompt: list[int], reply: list[int]) -> dict[str, Any]:
        """What a line of the log says about a reply."""
        try:
            text = None if self._one_vocabulary else character_spans(self._replay.target_tokenizer, prompt)[0]
            passage = Passage(text, prompt if text is None else None, prompt, [reply], [len(reply)])
            scores = self._replay.score(passage, arms=_ARMS)
        except Exception as error:
            return {"error": _describe(error)}
        return {"arms": loggable(scores), "gap_recovered": _gap_recovered(scores)}

    def _write(self, line: dict[str, Any]) -> bool:
        try:
            self._log.append({"time": line["time"], "mapper": self._mapper, **line})
        except OSError as error:
            logger.warning(f"A comparison is lost, the log {self._log.path} cannot be written: {error}.")
            return False
        return True


def _gap_recovered(scores: dict[str, ArmScore]) -> float | None:
    native, translated, no_context = (scores[arm].loss / scores[arm].positions for arm in _ARMS)
    return (no_context - translated) / (no_context - native) if no_context - native >= _LEAST_GAP else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _describe(error: Exception) -> str:
    """Kind and place of an error. Its message may quote the conversation."""
    logger.debug("A reply could not be compared.", exc_info=error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} ({Path(place.filename).name}, line {place.lineno})"
