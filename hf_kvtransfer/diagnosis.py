"""Will a pair of models work, why not, and what is to be expected? From live models, or from their configs alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .alignment import align_tokens
from .alignment.spans import encode_with_spans
from .errors import AlignmentError, TokenizerMismatchError, UnsupportedModelError
from .fidelity.gate import FidelityGate
from .fitting.costs import MapPlan
from .fitting.fit import NUM_SOURCE_LAYERS
from .fitting.inputs import Inputs
from .geometry import KVGeometry
from .identity.tokenizer import tokenizer_fingerprint
from .mapper import KVMapper
from .outline import ModelOutline
from .translation import MIN_COVERAGE


# Prose, code, numbers and other scripts: where tokenizers differ.
SAMPLE = (
    "The harbour master counted 1,284 crates before 7:45 on Tuesday. “Again,” she said, and the clerk sighed.\n"
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)  # not for an empty list\n"
    "Die Straße führt über drei Brücken. La niña comió piñas. 東京は晴れです。 Привет, мир! 🙂\n"
)
_SAME_MODEL_HINT = (
    "They cache the same. If one is a fine-tune, an adapter or another precision of the other, fit with kind "
    "'identity'."
)


@dataclass(frozen=True)
class Finding:
    """
    One thing that was found about a pair.

    Args:
        topic (`str`):
            What it is about.
        level (`str`):
            `"good"`, `"note"`, or `"bad"` if it keeps the pair from working.
        text (`str`):
            For people.
    """

    topic: str
    level: Literal["good", "note", "bad"]
    text: str


@dataclass(frozen=True)
class Side:
    """
    What is at hand of one model of a pair.

    Args:
        name (`str`):
            For messages.
        config (`PreTrainedConfig`):
            Its config.
        model (`PreTrainedModel`, *optional*):
            The model itself. Without it the config is all that is looked at.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Its tokenizer.
    """

    name: str
    config: PreTrainedConfig
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def outline(self) -> ModelOutline:
        """What it caches. Raises [`UnsupportedModelError`]."""
        return ModelOutline.from_config(self.config) if self.model is None else ModelOutline.from_model(self.model)


def diagnose(source: Side, target: Side, mapper: KVMapper | None = None, tokens: int = 4096) -> list[Finding]:
    """
    Look at a pair of models, and at a mapper if there is one.

    Args:
        source ([`Side`]), target ([`Side`]):
            The two models.
        mapper ([`KVMapper`], *optional*):
            That is to be used on them.
        tokens (`int`, *optional*, defaults to 4096):
            Length of a context for which memory is told.

    Returns:
        `list[Finding]`: The pair works if none of them is `"bad"`.
    """
    findings: list[Finding] = []
    outlines: dict[str, ModelOutline] = {}
    for role, side in (("source", source), ("target", target)):
        try:
            outlines[role] = side.outline()
        except UnsupportedModelError as error:
            findings.append(Finding(role, "bad", str(error)))
            continue
        findings += _about_model(role, side, outlines[role])
    findings += _about_tokenizers(source, target)
    if len(outlines) == 2:
        findings += _about_pair(outlines["source"], outlines["target"], tokens)
        if mapper is not None:
            findings += _about_mapper(mapper, source, target, outlines["source"], outlines["target"])
    return findings


def _about_model(role: str, side: Side, outline: ModelOutline) -> Iterator[Finding]:
    yield Finding(role, "good", f"{outline.model_class} caches {outline.geometry.describe()}; {outline.positions}.")
    if not outline.is_rotary_checked:
        yield Finding(role, "note", "Whether positions can be taken off its keys shows when its weights are there.")
    if outline.rotary_limit is not None:
        yield Finding(
            role,
            "note",
            f"Contexts of more than {outline.rotary_limit:,} tokens are refused: from there on its rotary embedding "
            "depends on the length of each call.",
        )
    if side.tokenizer is not None and (largest := _largest_id(side.tokenizer)) >= outline.vocab_size:
        yield Finding(
            role,
            "bad",
            f"Its tokenizer has token ids up to {largest:,}, the model has {outline.vocab_size:,} embeddings: they do "
            "not belong together.",
        )


def _about_tokenizers(source: Side, target: Side) -> Iterator[Finding]:
    first, second = source.tokenizer, target.tokenizer
    missing = [side.name for side in (source, target) if side.tokenizer is None]
    if first is None or second is None:
        yield Finding("tokenizers", "note", f"Not compared, that of {' and that of '.join(missing)} is not there.")
        return
    try:
        if tokenizer_fingerprint(first) == tokenizer_fingerprint(second):
            yield Finding("tokenizers", "good", "The same: every token stands for itself.")
            return
        (source_ids, source_spans), (target_ids, target_spans) = (
            encode_with_spans(tokenizer, SAMPLE) for tokenizer in (first, second)
        )
        alignment = align_tokens(SAMPLE, source_spans, SAMPLE, target_spans)
    except (TokenizerMismatchError, AlignmentError) as error:
        yield Finding("tokenizers", "bad", str(error))
        return
    text = (
        f"They differ, and are aligned by characters. Of {len(target_ids)} target tokens of a mixed sample "
        f"({len(source_ids)} of the source's) {alignment.coverage:.0%} have source text behind them, and "
        f"{alignment.boundary_share:.0%} of these end where a source token ends."
    )
    if alignment.coverage < MIN_COVERAGE:
        yield Finding("tokenizers", "bad", f"{text} At least {MIN_COVERAGE:.0%} must have.")
    else:
        yield Finding("tokenizers", "good" if alignment.boundary_share > 0.7 else "note", text)


def _about_pair(source: ModelOutline, target: ModelOutline, tokens: int) -> Iterator[Finding]:
    lengths = [length for side in (source, target) if (length := side.max_positions) is not None]
    if lengths:
        yield Finding("length", "good", f"Contexts of up to {min(lengths):,} tokens, what both can read.")
    if source.geometry == target.geometry:
        yield Finding("expectation", "note", _SAME_MODEL_HINT)
    widths = [_width(side.geometry) for side in (source, target)]
    if widths[0] < widths[1] / 2:
        yield Finding(
            "expectation",
            "note",
            f"The source caches {widths[0]:,} numbers for a token, the target {widths[1]:,}: much of what the target "
            "would know is not there to be translated. More native layers help.",
        )
    plan = MapPlan("linear", source.geometry, target.geometry, target.hidden_size)
    readable = [i for i, layer in enumerate(source.geometry.layers) if layer is not None]
    inputs = Inputs(readable[:NUM_SOURCE_LAYERS])
    mapped = [i for i, layer in enumerate(target.geometry.layers) if layer is not None and i > 0]
    size = sum(plan.num_bytes(i, inputs) for i in mapped)
    products = sum(plan.num_products(i, inputs) for i in mapped)
    yield Finding(
        "memory",
        "good",
        f"{tokens:,} tokens take {_megabytes(2 * tokens * widths[0])} in the source's cache and "
        f"{_megabytes(2 * tokens * widths[1])} in the target's, in 16 bits. A mapper fitted as it is by default takes "
        f"{_megabytes(size)}.",
    )
    share = products / max(target.num_parameters - target.vocab_size * target.hidden_size, 1)
    yield Finding(
        "expectation",
        "good" if share < 0.5 else "note",
        f"Translating a token with it takes {share:.1%} of the multiplications of reading it."
        + ("" if share < 0.5 else " That is little to gain: fit with fewer source layers, or another kind."),
    )


def _about_mapper(
    mapper: KVMapper, source: Side, target: Side, source_outline: ModelOutline, target_outline: ModelOutline
) -> Iterator[Finding]:
    config = mapper.config
    sides = (
        ("source", source, source_outline.geometry, mapper.source_geometry, config.source),
        ("target", target, target_outline.geometry, mapper.target_geometry, config.target),
    )
    fits = True
    for role, side, geometry, expected, described in sides:
        if geometry != expected:
            fits = False
            yield Finding(
                "mapper",
                "bad",
                f"It was fitted for a {role} of {expected.describe()} ({described['name']}), {side.name} caches "
                f"{geometry.describe()}.",
            )
        if side.tokenizer is None or described["tokenizer"] is None:
            continue
        try:
            same = tokenizer_fingerprint(side.tokenizer) == described["tokenizer"]
        except TokenizerMismatchError:  # said of the tokenizers already
            continue
        if not same:
            fits = False
            yield Finding("mapper", "bad", f"It was fitted with another tokenizer of the {role}.")
    if config.native_layers is None and config.token_features not in (0, target_outline.hidden_size):
        fits = False
        yield Finding(
            "mapper",
            "bad",
            f"It reads token embeddings of width {config.token_features}, {target.name}'s are "
            f"{target_outline.hidden_size} wide.",
        )
    if fits:
        yield Finding("mapper", "good", f"It fits the pair, and takes {_megabytes(mapper.num_bytes())}.")
    verdict = FidelityGate().admit(
        mapper,
        source.model,
        target.model,
        source_tokenizer=source.tokenizer if source.model is not None else None,
        target_tokenizer=target.tokenizer if target.model is not None else None,
    )
    if verdict.admitted:
        checked = "of these very models" if source.model is not None and target.model is not None else "on paper"
        yield Finding("evidence", "good", f"The default gate admits it, {checked}.")
    for reason in verdict.reasons:
        yield Finding("evidence", "bad", f"The default gate refuses it: {reason}.")


def _width(geometry: KVGeometry) -> int:
    return sum(geometry.num_features(i) for i in range(len(geometry.layers)))


def _largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB"
