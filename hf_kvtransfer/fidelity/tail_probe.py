"""The probe: the target reads the end of a translation itself, and the evidence says what it should find there."""

from ..errors import EvidenceError
from ..layers import FilledTranslator, LayerTranslator
from ..segments.joined import SegmentedTranslation
from ..translation import Translation
from .probe_band import ProbeBand, ProbeResult
from .tail_reading import read_tail


def probe_tail(
    translation: Translation | SegmentedTranslation, wanted: int | None
) -> tuple[LayerTranslator, ProbeResult | None]:
    """
    Let the target read the tail, if there is a band to compare its loss with.

    Args:
        translation ([`Translation`] or [`SegmentedTranslation`]):
            Its last tokens are probed; of several segments those of the last one.
        wanted (`int`, *optional*):
            Tokens to read, by default as many as the evidence recommends, 0 for no probe.

    Returns:
        `tuple[LayerTranslator, ProbeResult | None]`: What the cache is to be made of, with what the target has read in
        it, and what the probe found, `None` if there was none.

    Raises:
        `EvidenceError`: a number of tokens is wanted, but the evidence has no band.
    """
    if not translation.segments:
        return translation, None
    last = translation.segments[-1]
    try:
        report = last.mapper.evidence
    except EvidenceError:  # which only a gate that is not strict has admitted
        report = None
    band = None if report is None or report.probe is None else ProbeBand.from_dict(report.probe)
    if band is None and wanted:
        raise EvidenceError(
            f"`probe_tokens` is {wanted}, but the evidence of mapper {last.mapper.name} has no band to compare the "
            "loss on them with. Evaluate the mapper on more text, or leave `probe_tokens` out."
        )
    tokens = band.num_tokens(last.mapped_tokens, wanted) if band is not None and last.length else 0
    if not tokens:
        return translation, None
    readings, cache = read_tail(last, tokens, translation)
    return FilledTranslator(translation, cache), band.judge(readings, tokens)
