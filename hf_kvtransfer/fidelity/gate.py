"""Is this mapper, on this pair of models, good enough to be used? Decided on its evidence."""

import dataclasses

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..cache_policy import cache_policy
from ..effort import check_effort
from ..errors import EvidenceError
from ..identity import ModelIdentity
from ..mapper import KVMapper
from ..source import SourceKV
from .arms import arm_at, effort_of
from .no_evidence import without_evidence
from .report import FidelityReport
from .statistics import MIN_DOCUMENTS, MIN_POSITIONS


@dataclasses.dataclass(frozen=True)
class Verdict:
    """
    What a gate decided.

    Args:
        admitted (`bool`):
            Whether the mapper may be used.
        reasons (`tuple[str, ...]`):
            All that speaks against it; with a gate that is not strict it is admitted in spite of them.
        strict (`bool`):
            Whether the gate was strict.
        mapper (`str`):
            The mapper's name.
        effort (`float`, *optional*, defaults to 0):
            Of the target, with which it was judged.
    """

    admitted: bool
    reasons: tuple[str, ...]
    strict: bool
    mapper: str
    effort: float = 0.0

    def __str__(self) -> str:
        word = "admitted" if self.admitted else "refused"
        if self.admitted and self.reasons:
            word = "admitted by a gate that is not strict, in spite of this"
        if self.effort:
            word = f"with an effort of {self.effort:g} {word}"
        return "\n  - ".join([f"{self.mapper}: {word}", *self.reasons])


@dataclasses.dataclass(frozen=True)
class FidelityGate:
    """
    Thresholds that a mapper's evidence must meet, for what it is to be used for.

    The gap recovered is the measure: 0 is what the target does without the context, 1 is what it does after reading
    it. Agreement and loss alone flatter a mapper, since most tokens are easy without any context.

    Args:
        capabilities (`tuple[str, ...]`, *optional*):
            Those of the evidence that this use asks for; only what was measured on them counts. All by default.
        min_gap_recovered (`float`, *optional*, defaults to 0.5):
            For the *worst* capability for which the context matters at all. Below one half the target has lost more
            of what the context was worth than it has kept. A capability of fewer than 8 documents is too small to be
            judged by itself, but counts in everything else.
        min_late_turns (`float`, *optional*, defaults to 0.5):
            For the late-turn-weighted mean over dialogues, where errors have had the longest context to build up.
            Not asked of evidence without dialogues.
        min_agreement (`float`, *optional*, defaults to 0.7):
            Share of positions at which the target's most probable token is the native one, over all text.
        max_control (`float`, *optional*, defaults to 0.5):
            Gap recovered by a translation of another document, and by a random map, as a share of the mapper's own.
            Another document of the same kind helps with style and topic, too; one that helps more shows that the
            measure hardly looks at the content. A random map keeps what native layers and the target's first tokens
            are worth by themselves. Each must also lie wholly below the mapper's own interval.
        min_positions (`int`, *optional*, defaults to 384):
            Scored positions: the standard error of an agreement of one half is then 2.5 percentage points.
        allow_unverified (`bool`, *optional*, defaults to `False`):
            Whether weights may go unverified that cannot be compared with those that were measured, because one of
            the two copies is quantised.
        strict (`bool`, *optional*, defaults to `True`):
            Whether to refuse. If `False` every mapper is admitted, and the verdict still lists what speaks against it.
    """

    capabilities: tuple[str, ...] | None = None
    min_gap_recovered: float = 0.5
    min_late_turns: float = 0.5
    min_agreement: float = 0.7
    max_control: float = 0.5
    min_positions: int = MIN_POSITIONS
    allow_unverified: bool = False
    strict: bool = True

    def __post_init__(self):
        if self.capabilities is not None and (isinstance(self.capabilities, str) or not self.capabilities):
            raise ValueError(
                f"`capabilities` must be a tuple of names, or None for all of the evidence, got {self.capabilities!r}."
            )
        for name in ("min_gap_recovered", "min_late_turns", "min_agreement", "max_control"):
            if not getattr(self, name) <= 1:  # nor may it be NaN, which everything would meet
                raise ValueError(f"`{name}` is a share of at most 1, got {getattr(self, name)}.")
        if not self.min_positions >= 1:
            raise ValueError(f"`min_positions` must be at least 1, got {self.min_positions}.")

    def admit(
        self,
        mapper: KVMapper,
        source: PreTrainedModel | SourceKV | None,
        target: PreTrainedModel | None,
        *,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        sink_tokens: int | None = None,
        tail_tokens: int | None = None,
        target_cache: Cache | None = None,
        effort: float = 0.0,
    ) -> Verdict:
        """
        Decide whether a mapper may be used on a pair of models.

        Args:
            mapper ([`KVMapper`]):
                With its evidence. Without, it is admitted only if it copies layers that are all the same in both
                models, see [`adapter_mapper`].
            source (`PreTrainedModel` or [`SourceKV`], *optional*):
                The source, or what it has read. `None` leaves it unchecked.
            target (`PreTrainedModel`, *optional*):
                The model that is to continue. `None` leaves it unchecked.
            source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
            target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Compared with those of the evidence if given.
            sink_tokens (`int`, *optional*):
                First tokens that the target is to read itself, by default as in the mapper's fit. Not fewer than when
                it was measured.
            tail_tokens (`int`, *optional*):
                Last tokens of the context that the target is to read itself, by default as many as when it was
                measured. Not fewer.
            target_cache (`Cache`, *optional*):
                What the target's tokens will be stored in, by default the cache that `generate` makes for it.
            effort (`float`, *optional*, defaults to 0):
                Share of the translated tokens that the target is to read again, see [`FidelityGate.judge`].

        Returns:
            [`Verdict`]

        Raises:
            `ValueError`: `effort` is no share.
        """
        check_effort(effort)
        try:
            report = mapper.evidence
        except EvidenceError as error:
            return self.verdict(mapper.name, [str(error)], effort)
        if report is None:
            return self.verdict(mapper.name, without_evidence(mapper, source, target, target_cache), effort)
        reasons = []
        if report.mapper["digest"] != mapper.digest():
            reasons.append("its evidence is about another mapper: its weights or its layout have changed since")
        first = mapper.config.sink_tokens if sink_tokens is None else sink_tokens
        # The one that the next token is predicted from is no part of what is translated, whoever holds it back.
        last = None if tail_tokens is None else max(tail_tokens, 1)
        for which, used, name in (("first", first, "sink_tokens"), ("last", last, "tail_tokens")):
            measured = report.settings.get(name, used)
            if used is not None and used < measured:
                reasons.append(f"the target is to read {used} {which} tokens itself, it read {measured} when measured")
        if isinstance(source, SourceKV):
            reasons += self._compare(report, "source", source.identity, source.cache_policy)
        elif source is not None:
            identity = ModelIdentity.from_model(source, source_tokenizer)
            reasons += self._compare(report, "source", identity, cache_policy(source))
        if target is not None:
            identity = ModelIdentity.from_model(target, target_tokenizer)
            policy = cache_policy(target if target_cache is None else target_cache)
            reasons += self._compare(report, "target", identity, policy)
        return self.verdict(mapper.name, reasons + self.judge(report, effort), effort)

    def judge(self, report: FidelityReport, effort: float = 0.0) -> list[str]:
        """
        What a report's figures leave to be desired, whatever the models at hand.

        Args:
            report ([`FidelityReport`]):
                An evaluation.
            effort (`float`, *optional*, defaults to 0):
                Share of the translated tokens that the target is to read again. The thresholds are asked of the
                largest measured one that is not above it, since to read more brings the cache nearer to a prefill; if
                there is none, of the translation as it is. Controls are compared with that in any case: what the
                target reads itself is no merit of the maps.

        Returns:
            `list[str]`: Empty if every threshold is met.

        Raises:
            `ValueError`: `effort` is no share.
        """
        check_effort(effort)
        reasons: list[str] = []
        figures = report.figures
        if self.capabilities is not None:
            known = sorted(figures["capabilities"])
            if unknown := [name for name in self.capabilities if name not in known]:
                return [f"its evidence says nothing about {unknown}, only about {known}"]
            figures = report.figures_of(self.capabilities)
        if figures["positions"] < self.min_positions:
            reasons.append(
                f"only {figures['positions']} positions were scored, at least {self.min_positions} are needed to "
                "admit anything"
            )
        arm = arm_at(figures["arms"], effort)
        at = f"with an effort of {measured:g} " if (measured := effort_of(arm)) else ""
        gaps = {
            name: gap["value"]
            for name, capability in figures["capabilities"].items()
            if (gap := capability["arms"][arm]["gap_recovered"]) is not None
        }
        overall = figures["arms"]["translated"]["gap_recovered"]
        if figures["documents"] < MIN_DOCUMENTS:
            reasons.append(f"only {figures['documents']} documents were scored, at least {MIN_DOCUMENTS} are needed")
        elif overall is None:
            reasons.append("the context made no clear difference to the target in what was measured")
        elif not gaps:
            reasons.append("no capability has enough documents, or a clear difference, to be judged by itself")
        elif min(gaps.values()) < self.min_gap_recovered:
            worst = min(gaps, key=gaps.__getitem__)
            reasons.append(
                f"{at}it recovers {gaps[worst]:.2f} of the gap in its worst capability ({worst}), at least "
                f"{self.min_gap_recovered} is asked for"
            )
        reasons += [
            f"{at}in capability {name} the target does worse on the translated cache than without any context"
            for name, capability in figures["capabilities"].items()
            if name not in gaps
            and capability["documents"] >= MIN_DOCUMENTS
            and capability["arms"][arm]["loss"] > capability["arms"]["no_context"]["loss"]
        ]
        late_turns = figures["late_turns"] and figures["late_turns"]["arms"][arm]["gap_recovered"]
        if figures["late_turns"] and late_turns is None:
            reasons.append("the dialogues are too few, or the context matters too little in them, to judge late turns")
        elif late_turns and late_turns["value"] < self.min_late_turns:
            reasons.append(
                f"{at}it recovers {late_turns['value']:.2f} of the gap in dialogues, late turns weighted most, at "
                f"least {self.min_late_turns} is asked for"
            )
        arms = figures["arms"]
        if arms[arm]["agreement"] < self.min_agreement:
            reasons.append(
                f"{at}the next token is the native one in {arms[arm]['agreement']:.2f} of the positions, at "
                f"least {self.min_agreement} is asked for"
            )
        for name, looks_at in (("other_document", "the content"), ("random_map", "the maps")):
            control = arms.get(name, {}).get("gap_recovered")
            if overall is None:
                continue
            if control is None:
                reasons.append(f"the control {name!r} was not measured")
            elif control["value"] > self.max_control * overall["value"] or control["high"] >= overall["low"]:
                reasons.append(
                    f"the control {name!r} recovers {control['value']:.2f} of the gap, too close to the mapper's own "
                    f"{overall['value']:.2f}: what was measured does not depend on {looks_at}"
                )
        return reasons

    def _compare(self, report: FidelityReport, side: str, identity: ModelIdentity, policy: dict | None) -> list[str]:
        """How a model at hand differs from the one that was measured."""
        evidence = getattr(report, side)
        try:
            differences = report.identity(side).differences(identity)
        except (KeyError, TypeError, ValueError) as error:
            return [f"its evidence does not say which {side} was measured ({error!r})"]
        reasons = [
            f"the {side} is not the one that was measured: {difference.part} {difference.status} ({difference.detail})"
            for difference in differences
            if not (difference.status == "unverified" and self.allow_unverified)
        ]
        measured = evidence["cache_policy"]
        return reasons + [
            f"the {side}'s cache is {'' if policy.get(key) else 'not '}{key}, the measured one was "
            f"{'' if measured.get(key) else 'not '}{key}"
            for key in ("quantized", "evicting")
            if policy is not None and bool(policy.get(key)) != bool(measured.get(key))
        ]

    def verdict(self, mapper: str, reasons: list[str], effort: float = 0.0) -> Verdict:
        """What follows from all that speaks against the mapper of this name, with an effort of the target's."""
        return Verdict(not reasons or not self.strict, tuple(reasons), self.strict, mapper, effort)
