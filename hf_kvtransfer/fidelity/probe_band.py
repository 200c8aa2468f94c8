"""The probe's judgement: what the tail of a context looks like on top of a right translation."""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Sequence

from ..errors import EvidenceError
from .tail_reading import MAX_PROBE_TOKENS, PROBE_TOKENS, TailReading


# Of the operating curve.
FALSE_ALARM_RATES = (0.01, 0.05, 0.1)
# The default number of tokens is the smallest that catches this share of caches of a wrong document.
WANTED_CATCH = 0.9
# Exact mappers leave errors of rounding only, whose spread says nothing: an error must be this much larger at least to
# count as one more standard deviation.
_MIN_SPREAD = 0.05
# Of the cross-validation, in which no reading is judged by a band that was fitted on it.
_FOLDS = 10


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """
    What a probe found, for the row that is furthest outside.

    Args:
        passed (`bool`):
            Whether every row's tail lay inside the bands.
        tokens (`int`):
            Tokens that the target has read.
        loss (`float`), max_loss (`float`):
            Its mean loss there, in nats per token, and the largest that was allowed.
        deviation (`float`), max_deviation (`float`):
            How far what it has cached there is from what the mapper makes of the same tokens, and what was allowed: in
            standard deviations, for the layer that is furthest off.
    """

    passed: bool
    tokens: int
    loss: float
    max_loss: float
    deviation: float
    max_deviation: float

    def __str__(self) -> str:
        return (
            f"on the last {self.tokens} tokens the target's loss is {self.loss:.2f} nats per token, up to "
            f"{self.max_loss:.2f} is to be expected, and its states are off by {self.deviation:.1f} standard "
            f"deviations, up to {self.max_deviation:.1f}"
        )


@dataclasses.dataclass(frozen=True)
class Band:
    """
    What right translations look like on a tail of some length.

    Where the source's own loss on the tail is known, the target's is expected to be `intercept + slope * source loss`
    (least squares): a text that is hard for one model is hard for the other. `residuals` are the differences; `losses`
    serve where the source's is not known. `error_means` and `error_spreads` are of the state errors, by keys and
    values of each layer, and `deviations` the largest number of spreads above the mean for each document. All lists
    of documents are sorted.
    """

    slope: float | None
    intercept: float | None
    residuals: list[float]
    losses: list[float]
    error_means: list[float]
    error_spreads: list[float]
    deviations: list[float]

    @classmethod
    def fit(cls, readings: Sequence[TailReading], tokens: int) -> "Band":
        """A band without residuals and deviations."""
        losses = [_loss(reading, tokens) for reading in readings]
        sources = [_source_loss(reading, tokens) for reading in readings]
        slope = intercept = None
        if None not in sources and len(set(sources)) > 1:
            slope, intercept = statistics.linear_regression(sources, losses)
        columns = list(zip(*(_errors(reading, tokens) for reading in readings), strict=True))
        means = [statistics.fmean(column) for column in columns]
        spreads = [max(statistics.stdev(column), _MIN_SPREAD) for column in columns]
        return cls(slope, intercept, [], sorted(losses), means, spreads, [])

    @classmethod
    def calibrate(cls, readings: Sequence[TailReading], tokens: int) -> "Band":
        """A band whose residuals and deviations are those of readings that the rest of it was not fitted on."""
        folds = [(cls.fit(rest, tokens), others) for rest, others in _folds(readings)]
        held_out = [(fold, reading) for fold, others in folds for reading in others]
        band = cls.fit(readings, tokens)
        residuals = [fold.residual(reading, tokens) for fold, reading in held_out]
        return dataclasses.replace(
            band,
            residuals=[] if None in residuals else sorted(residuals),
            deviations=sorted(fold.deviation(reading, tokens) for fold, reading in held_out),
        )

    def residual(self, reading: TailReading, tokens: int) -> float | None:
        """How much more the target loses than the source's loss leads one to expect."""
        source_loss = _source_loss(reading, tokens)
        if self.slope is None or self.intercept is None or source_loss is None:
            return None
        return _loss(reading, tokens) - self.intercept - self.slope * source_loss

    def deviation(self, reading: TailReading, tokens: int) -> float:
        errors = _errors(reading, tokens)
        if len(errors) != len(self.error_means):
            return math.inf
        deviations = ((e - m) / s for e, m, s in zip(errors, self.error_means, self.error_spreads, strict=True))
        return max(deviations, default=0.0)  # there are none where the target makes all layers itself

    def max_loss(self, reading: TailReading, tokens: int, rate: float) -> float:
        """The loss that a right translation exceeds at most at this rate."""
        residual = self.residual(reading, tokens)
        if residual is None or not self.residuals:
            return _upper(self.losses, rate)
        return _loss(reading, tokens) - residual + _upper(self.residuals, rate)

    def judge(self, reading: TailReading, tokens: int, rate: float) -> ProbeResult:
        # Either test may raise the alarm: each is given half of the rate.
        loss, max_loss = _loss(reading, tokens), self.max_loss(reading, tokens, rate / 2)
        deviation, max_deviation = self.deviation(reading, tokens), _upper(self.deviations, rate / 2)
        passed = loss <= max_loss and deviation <= max_deviation  # not so for NaN
        return ProbeResult(passed, tokens, loss, max_loss, deviation, max_deviation)


@dataclasses.dataclass(frozen=True)
class ProbeBand:
    """
    Calibrated bands, for each number of tokens, and how many planted corruptions they catch.

    Args:
        tokens (`int`):
            Number of tokens to read by default.
        false_alarm_rate (`float`):
            Share of right translations that may be refused.
        documents (`int`):
            Right translations that the bands were calibrated on.
        bands (`dict[int, Band]`):
            By number of tokens.
        curve (`list[dict]`):
            The operating curve: for each number of tokens and false-alarm rate the false alarms measured by
            cross-validation, and the share of each corruption that was caught, and caught by the loss alone at this
            rate.
    """

    tokens: int
    false_alarm_rate: float
    documents: int
    bands: dict[int, Band]
    curve: list[dict]

    @classmethod
    def calibrate(
        cls,
        right: Sequence[TailReading],
        wrong: dict[str, Sequence[TailReading]],
        false_alarm_rate: float = 0.05,
    ) -> "ProbeBand | None":
        """
        Calibrate on readings of right translations, and try the bands on corrupted ones.

        Args:
            right (`Sequence[TailReading]`):
                Readings of at least [`MAX_PROBE_TOKENS`] tokens; a shorter probe is judged by their first ones.
            wrong (`dict[str, Sequence[TailReading]]`):
                By name of the corruption.
            false_alarm_rate (`float`, *optional*, defaults to 0.05):
                Share of right translations that may be refused.

        Returns:
            `ProbeBand`: `None` with fewer readings than the rate can be told from.
        """
        if len(right) < math.ceil(2 / false_alarm_rate) - 1:
            return None
        bands: dict[int, Band] = {}
        curve: list[dict] = []
        for tokens in PROBE_TOKENS:
            band = bands[tokens] = Band.calibrate(right, tokens)
            folds = [(Band.calibrate(rest, tokens), others) for rest, others in _folds(right)]
            for rate in sorted({*FALSE_ALARM_RATES, false_alarm_rate}):
                alarms = [not fold.judge(other, tokens, rate).passed for fold, others in folds for other in others]
                found = {
                    name: [
                        (
                            not band.judge(reading, tokens, rate).passed,
                            not _loss(reading, tokens) <= band.max_loss(reading, tokens, rate),
                        )
                        for reading in readings
                    ]
                    for name, readings in wrong.items()
                    if readings
                }
                curve.append(
                    {
                        "tokens": tokens,
                        "false_alarm_rate": rate,
                        "measured_false_alarms": statistics.fmean(alarms),
                        "caught": {name: statistics.fmean(hit for hit, _ in hits) for name, hits in found.items()},
                        "caught_by_loss": {
                            name: statistics.fmean(hit for _, hit in hits) for name, hits in found.items()
                        },
                    }
                )
        good = [
            point["tokens"]
            for point in curve
            if point["false_alarm_rate"] == false_alarm_rate
            and point["caught"].get("other_document", 0) >= WANTED_CATCH
        ]
        return cls(min(good, default=MAX_PROBE_TOKENS), false_alarm_rate, len(right), bands, curve)

    def num_tokens(self, available: int, wanted: int | None = None) -> int:
        """
        Tokens to read: as many as there is a band for, and at most half of the `available` ones (0 if those are fewer
        than twice the smallest band: such a context costs little to read anyway).
        """
        wanted = self.tokens if wanted is None else wanted
        wanted = max(wanted, PROBE_TOKENS[0]) if wanted else 0
        place = bisect.bisect_right(PROBE_TOKENS, min(wanted, available // 2))
        return PROBE_TOKENS[place - 1] if place else 0

    def judge(self, readings: Sequence[TailReading], tokens: int) -> ProbeResult:
        """
        Compare the readings of a batch with the bands. The rows share the rate of false alarms, as far as the number
        of documents allows: below one document's share a row is allowed what was seen at most.
        """
        rate = self.false_alarm_rate / len(readings)
        results = [self.bands[tokens].judge(reading, tokens, rate) for reading in readings]
        return max(results, key=lambda r: (not r.passed, r.deviation - r.max_deviation))

    def to_dict(self) -> dict:
        """As JSON has it, see [`ProbeBand.from_dict`]."""
        state = dataclasses.asdict(self)
        return state | {"bands": {str(tokens): band for tokens, band in state["bands"].items()}}

    @classmethod
    def from_dict(cls, state: dict) -> "ProbeBand":
        """
        Raises:
            `EvidenceError`: `state` is not what [`ProbeBand.to_dict`] gives.
        """
        try:
            bands = {int(tokens): Band(**band) for tokens, band in state["bands"].items()}
            if set(bands) != set(PROBE_TOKENS) or not all(band.losses and band.deviations for band in bands.values()):
                raise ValueError(f"bands for {sorted(bands)} tokens")
            return cls(**state | {"bands": bands})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise EvidenceError(
                f"The probe's bands in the mapper's evidence are damaged ({error!r}). Evaluate the mapper again."
            ) from error


def _folds(readings: Sequence[TailReading]) -> list[tuple[list[TailReading], Sequence[TailReading]]]:
    """Each part of the readings, and before it the rest."""
    return [([r for j, r in enumerate(readings) if j % _FOLDS != i], readings[i::_FOLDS]) for i in range(_FOLDS)]


def _upper(sample: Sequence[float], rate: float) -> float:
    """
    What a further number of the same kind exceeds with a probability of about `rate`: the order statistic of conformal
    prediction on held-out scores (Vovk, 2015), and the largest number where the rate is finer than the sorted sample.
    """
    return sample[min(math.ceil((len(sample) + 1) * (1 - rate)), len(sample)) - 1]


def _loss(reading: TailReading, tokens: int) -> float:
    return statistics.fmean(reading.losses[:tokens])


def _source_loss(reading: TailReading, tokens: int) -> float | None:
    return None if reading.source_losses is None else statistics.fmean(reading.source_losses[:tokens])


def _errors(reading: TailReading, tokens: int) -> list[float]:
    return reading.state_errors[PROBE_TOKENS.index(tokens)]
