"""Which mappers a request may use, and with which effort: the gate is asked, once for each mapper and source."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from .effort import Effort
from .errors import EvidenceError, RefusedError
from .fidelity.arms import effort_arms, effort_of
from .fidelity.gate import FidelityGate, Verdict
from .identity import ModelIdentity
from .mapper import KVMapper, mapper_for
from .source import SourceKV


@dataclasses.dataclass
class _Asked:
    """What the gate was asked, its verdict with any effort, and the one that counts."""

    mapper: KVMapper
    identity: ModelIdentity
    judge: Callable[[float], Verdict]
    verdict: Verdict

    @property
    def efforts(self) -> list[float]:
        """Those that the mapper's evidence has measured."""
        try:
            report = self.mapper.evidence
        except EvidenceError:  # the verdict says so
            return []
        return [] if report is None else [effort_of(arm) or 0.0 for arm in effort_arms(report.figures["arms"])]


class Admission:
    """
    Admits mappers to one request.

    Args:
        gate ([`FidelityGate`], *optional*):
            What is asked of the evidence.
        target (`PreTrainedModel`), target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The model that will continue.
        sink_tokens (`int`, *optional*), tail_tokens (`int`, *optional*), storage (`Cache`, *optional*):
            As of [`TranslatedCache`]. `None` for a tail that is not that of what is translated.
        effort (`float` or `"auto"`, *optional*, defaults to 0):
            Share of the translated tokens that the target is to read again. `"auto"` for the least of 0 and the
            measured ones with which all mappers of the request are admitted; one that is admitted with none of them
            is refused.
        revision (`str`, *optional*):
            Of mappers that are named by a Hub id.
    """

    def __init__(
        self,
        gate: FidelityGate | None,
        target: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase | None,
        sink_tokens: int | None,
        tail_tokens: int | None,
        storage: Cache | None,
        effort: Effort = 0.0,
        revision: str | None = None,
    ):
        self.gate, self.target, self.revision = gate or FidelityGate(), target, revision
        self._options = {
            "target_tokenizer": target_tokenizer,
            "sink_tokens": sink_tokens,
            "tail_tokens": tail_tokens,
            "target_cache": storage,
        }
        self._chooses = effort == "auto"
        # With "auto" what was found so far, and why it is not less.
        self.effort: float = 0.0 if effort == "auto" else effort
        self.effort_reasons: tuple[str, ...] = ()
        self._loaded: dict[str, KVMapper] = {}
        self._asked: list[_Asked] = []

    def admit(self, mapper: KVMapper | str | Path, source_kv: SourceKV) -> KVMapper:
        """
        The mapper, loaded.

        Raises:
            `MapperFormatError`: it cannot be loaded.
            `RefusedError`: the gate does not admit it.
        """
        if not isinstance(mapper, KVMapper):
            name = str(mapper)
            if name not in self._loaded:
                self._loaded[name] = mapper_for(name, self.target, self.revision or "main")
            mapper = self._loaded[name]
        identity = source_kv.identity
        asked = next((known for known in self._asked if known.mapper is mapper and known.identity is identity), None)
        if asked is None:
            # Without a circle, in which what the source has read would outlive the request.
            ask = functools.partial(self.gate.admit, mapper, source_kv, self.target, **self._options)
            judge = functools.cache(lambda effort: ask(effort=effort))
            asked = _Asked(mapper, identity, judge, judge(self.effort))
            if self._chooses:
                self._choose(asked)
            self._asked.append(asked)
        if not asked.verdict.admitted:
            raise RefusedError(str(asked.verdict))
        return mapper

    def foresee_effort(self, mapper: KVMapper | str | Path, read: Callable[[], SourceKV]) -> float:
        """The effort of a request through one mapper; `read` gives what the source has read, if that matters."""
        if self._chooses:
            try:
                self.admit(mapper, read())
            # Whatever it is, it will come again where the mapper is used, and be dealt with there.
            except Exception:
                return 0.0
        return self.effort

    def _choose(self, new: _Asked) -> None:
        """Find the least effort with which this mapper and those admitted before are admitted, if there is one."""
        together = [*(asked for asked in self._asked if asked.verdict.admitted), new]
        efforts = sorted({0.0, *(effort for asked in together for effort in asked.efforts)})
        reasons: list[str] = []
        for effort in efforts:
            verdicts = [asked.judge(effort) for asked in together]
            if all(verdict.admitted for verdict in verdicts):
                self.effort, self.effort_reasons = effort, tuple(reasons)
                for asked, verdict in zip(together, verdicts, strict=True):
                    asked.verdict = verdict
                return
            reasons = [reason for verdict in verdicts if not verdict.admitted for reason in verdict.reasons]
        new.verdict = new.judge(efforts[-1])
        if new.verdict.admitted:  # alone
            new.verdict = dataclasses.replace(new.verdict, admitted=False, reasons=tuple(reasons))

    @property
    def mappers(self) -> list[KVMapper]:
        """Those that the gate was asked about."""
        return list({id(asked.mapper): asked.mapper for asked in self._asked}.values())

    @property
    def verdict(self) -> Verdict | None:
        """
        The gate's only one; of several, one that has admitted a mapper in spite of something, or else any that has
        admitted one. `None` if none was admitted or none was asked about.
        """
        verdicts = [asked.verdict for asked in self._asked]
        if len(verdicts) == 1:
            return verdicts[0]
        admitted = [verdict for verdict in verdicts if verdict.admitted]
        return max(admitted, key=lambda verdict: len(verdict.reasons), default=None)
