"""A range of a prompt's tokens, and where their keys and values come from."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ..compat import model_name
from ..mapper import KVMapper
from ..source import SourceKV


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """
    A range of the tokens of a target's prompt: translated from what a source has read, or read by the target itself.

    Args:
        start (`int`), stop (`int`):
            The range. Tokens stand at the positions of their numbers, wherever the source has read them.
        source_kv ([`SourceKV`], *optional*):
            What a source has read of this range, and nothing else: a slice of what it has read in all. `None` for a
            range that the target reads itself, on top of what precedes it.
        mapper ([`KVMapper`], `str` or `Path`, *optional*):
            Fitted for that source and the target, or the folder or Hub id of one.

    Raises:
        `ValueError`: the range is empty, or there is a source without a mapper or the other way round.
    """

    start: int
    stop: int
    source_kv: SourceKV | None = None
    mapper: KVMapper | str | Path | None = None

    def __post_init__(self):
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"A segment is a range of at least one token, got `start` {self.start} and `stop` {self.stop}."
            )
        if (self.source_kv is None) != (self.mapper is None):
            given, lacking = ("mapper", "source_kv") if self.source_kv is None else ("source_kv", "mapper")
            raise ValueError(
                f"The segment {self} has a `{given}`, but no `{lacking}`. Give both, or neither for tokens that the "
                "target is to read itself."
            )

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    @property
    def is_native(self) -> bool:
        """Whether the target reads it itself."""
        return self.source_kv is None


def check_segments(segments: Sequence[Segment], first: int, num_tokens: int, target: PreTrainedModel) -> None:
    """
    Check that segments follow each other without gaps, from the first token that is not cached, within the prompt.

    Raises:
        `ValueError`: they do not, or the target has no such positions.
    """
    done = first
    for segment in segments:
        if segment.start != done:
            is_gap = segment.start > done
            fault = f"leaves a gap behind token {done}" if is_gap else f"overlaps with what ends at token {done}"
            raise ValueError(
                f"The segment {segment} {fault}. Segments are in order and without gaps; what the target is to read "
                "itself is a `Segment(start, stop)`, too."
            )
        done = segment.stop
    if done > num_tokens:
        raise ValueError(f"The segments end at {done}, but the prompt (`input_ids`) has {num_tokens} tokens.")
    maximum = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if maximum is not None and done > maximum:
        raise ValueError(
            f"The segments end at {done}, but {model_name(target)} has {maximum} positions "
            "(`max_position_embeddings`). Leave some of them out."
        )
