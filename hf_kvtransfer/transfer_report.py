"""What became of one request."""

import dataclasses
from collections.abc import Sequence

from .fidelity.gate import Verdict
from .fidelity.probe_band import ProbeResult
from .mapper import KVMapper
from .segments.joined import SegmentedTranslation
from .translation import Translation


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """
    What a translated cache stands for, token by token, summed over the batch; or why it is empty.

    Args:
        outcome (`str`):
            `"translated"`, or `"recomputed"` if the target reads the context itself.
        mapper (`str`):
            Where the mapper came from; of several segments, all of them.
        revision (`str`, *optional*):
            Its commit, if it came from the Hub.
        reasons (`tuple[str, ...]`):
            Why the target recomputes, all or, of a cache of several segments, some of the tokens.
        verdict ([`Verdict`], *optional*):
            What the gate decided. `None` if it was not asked.
        probe ([`ProbeResult`], *optional*):
            What the probe found. `None` if there was none: it was turned off, the evidence has no band for it, or the
            context is too short.
        source_tokens (`int`):
            Tokens that the source read.
        translated_tokens (`int`):
            Target tokens whose keys and values are translated.
        native_tokens (`int`):
            Target tokens of the context that the target has read itself, at its start, for the probe, between
            segments that are translated, and as its `effort`.
        held_back_tokens (`int`):
            Target tokens at the end of the context that the target still has to read.
        native_layers (`int`, *optional*):
            The target's own first layers, up to this one, make the keys and values of all of these tokens; the others
            are translated. `None` if all are.
        coverage (`float`):
            Share of the target's tokens behind which a source token stands.
        boundary_share (`float`):
            Share of those that end where their source token ends.
        effort (`float`):
            Share of the translated tokens that the target was to read again.
        effort_reasons (`tuple[str, ...]`):
            Why not less, where the gate has chosen it (`effort="auto"`).
        layer_seconds (`dict[int, float]`):
            How long the translation of each layer took, what native layers took in the first of them. Filled as
            layers are translated.
    """

    outcome: str
    mapper: str
    revision: str | None = None
    reasons: tuple[str, ...] = ()
    verdict: Verdict | None = None
    probe: ProbeResult | None = None
    source_tokens: int = 0
    translated_tokens: int = 0
    native_tokens: int = 0
    held_back_tokens: int = 0
    native_layers: int | None = None
    coverage: float = 0.0
    boundary_share: float = 0.0
    effort: float = 0.0
    effort_reasons: tuple[str, ...] = ()
    layer_seconds: dict[int, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def named(cls, mappers: Sequence[KVMapper]) -> "TransferReport":
        """A report of nothing yet about a request through these mappers."""
        name = ", ".join(dict.fromkeys(mapper.name for mapper in mappers)) or "no mapper"
        return cls("recomputed", name, mappers[0].revision if len(mappers) == 1 else None)

    @classmethod
    def make(
        cls,
        outcome: str,
        translation: Translation | SegmentedTranslation,
        translated_tokens: int,
        *,
        verdict: Verdict | None = None,
        probe: ProbeResult | None = None,
        effort: float = 0.0,
        effort_reasons: Sequence[str] = (),
    ) -> "TransferReport":
        """A report with the counts of a translation, of which the target has not read so many tokens itself."""
        mappers = list({id(segment.mapper): segment.mapper for segment in translation.segments}.values())
        native_layers = [mapper.config.native_layers for mapper in mappers]
        return dataclasses.replace(
            cls.named(mappers),
            outcome=outcome,
            reasons=translation.reasons,
            verdict=verdict,
            probe=probe,
            source_tokens=sum(segment.source_tokens for segment in translation.segments),
            translated_tokens=translated_tokens,
            native_tokens=int(translation.attention_mask.sum()) - translated_tokens,
            held_back_tokens=translation.held_back_tokens,
            native_layers=None if None in native_layers else min(native_layers, default=None),
            coverage=translation.coverage,
            boundary_share=translation.boundary_share,
            effort=effort,
            effort_reasons=tuple(effort_reasons),
            layer_seconds=translation.layer_seconds,
        )

    def __deepcopy__(self, memo) -> "TransferReport":
        return self  # copies of a cache share their translation, and with it the times

    def __str__(self) -> str:
        mapper = self.mapper + (f"@{self.revision[:7]}" if self.revision else "")
        if self.outcome == "recomputed":
            return "\n  - ".join([f"{mapper}: the target reads the context itself", *self.reasons])
        notes = "" if self.native_layers is None else f"; layers 0 to {self.native_layers} are the target's own"
        notes += f"; effort {self.effort:g}" if self.effort else ""
        notes += "" if self.probe is None else f"; {self.probe}"
        text = (
            f"{mapper}: {self.translated_tokens} tokens translated, {self.native_tokens} read by the target, "
            f"{self.held_back_tokens} held back (source: {self.source_tokens}, coverage {self.coverage:.0%}){notes}"
        )
        if self.effort_reasons:
            text = "\n  - ".join([f"{text}; less is refused", *self.effort_reasons])
        if self.reasons:
            text = "\n  - ".join([f"{text}; not everything could be translated", *self.reasons])
        if self.verdict is not None and self.verdict.reasons:
            text = "\n  - ".join([f"{text}; the gate was not strict, in spite of this", *self.verdict.reasons])
        return text
