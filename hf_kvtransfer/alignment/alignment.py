"""Which source token speaks for each target token."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, chain
from os.path import commonprefix

import torch

from ..errors import AlignmentError
from .spans import Span, ordered


# Shorter common pieces (" of the ") turn up in any two texts.
_MIN_BLOCK_CHARACTERS = 8
# A run of this many words, spaces and punctuation marks that occurs once in each text ties the two together.
_ANCHOR_PIECES = 5
# difflib takes quadratic time. It only sees gaps between anchors up to this many pairs of pieces.
_MAX_GAP_PAIRS = 250_000
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, eq=False)
class TokenAlignment:
    """
    For each target token, the source token that it listens to.

    Args:
        source_index (`torch.LongTensor` of shape `[target_tokens]`):
            Index into the source tokens. Never decreases.
        aligned (`torch.BoolTensor` of shape `[target_tokens]`):
            False where the source has no counterpart, such as a template token that exists on one side only. Such a
            token listens to the last source token at or before its place.
        exact (`torch.BoolTensor` of shape `[target_tokens]`):
            True where the source token ends exactly where the target token ends.
        zero_width (`torch.BoolTensor` of shape `[target_tokens]`):
            True for tokens that stand for no text, such as a BOS. They do not count in the shares below.
    """

    source_index: torch.Tensor
    aligned: torch.Tensor
    exact: torch.Tensor
    zero_width: torch.Tensor

    @classmethod
    def identity(cls, length: int) -> "TokenAlignment":
        """The alignment of `length` (`int`) tokens with themselves."""
        yes = torch.ones(length, dtype=torch.bool)
        return cls(torch.arange(length), yes, yes.clone(), torch.zeros(length, dtype=torch.bool))

    def __getitem__(self, tokens: slice) -> "TokenAlignment":
        """The alignment of a range of target tokens."""
        return TokenAlignment(
            self.source_index[tokens], self.aligned[tokens], self.exact[tokens], self.zero_width[tokens]
        )

    @property
    def coverage(self) -> float:
        """Share of the target tokens with text that are aligned (1.0 if there are none)."""
        return _share(self.aligned[~self.zero_width])

    @property
    def boundary_share(self) -> float:
        """Share of the aligned target tokens with text that end where their source token ends."""
        return _share(self.exact[self.aligned & ~self.zero_width])

    @property
    def last_aligned(self) -> int:
        """Index of the last aligned target token, -1 if there is none: as far as the source can speak."""
        indices = self.aligned.nonzero()
        return int(indices[-1]) if len(indices) else -1

    @property
    def is_identity(self) -> bool:
        """True if each target token listens to the source token of the same number and ends with it."""
        in_order = torch.equal(self.source_index, torch.arange(len(self.source_index)))
        return in_order and bool(self.aligned.all()) and bool(self.exact.all())


def _share(mask: torch.Tensor) -> float:
    return mask.double().mean().item() if len(mask) else 1.0


def align_tokens(
    source_text: str, source_spans: list[Span], target_text: str, target_spans: list[Span]
) -> TokenAlignment:
    """
    Finds the source token that speaks for each target token.

    A target token listens to the source token that covers its last character. Where several source tokens share that
    character (pieces of one multibyte character) it is the last of them, since only that one has seen all of it. A
    target token whose last character the source has not read is not aligned, even if it begins in text that the
    source has read.

    Texts that differ (a longer prompt, two chat templates around the same contents) are matched by the blocks they
    have in common and in the same order.

    Args:
        source_text (`str`):
            What the source has read.
        source_spans (`list[tuple[int, int]]` of length `source_tokens`):
            First character and the one after the last of each source token, as in a fast tokenizer's
            `offset_mapping`. Zero-width spans, such as a BOS, have no text.
        target_text (`str`):
            What the target is to read.
        target_spans (`list[tuple[int, int]]` of length `target_tokens`):
            The same for the target tokens.

    Returns:
        `TokenAlignment`: One entry for each target token.

    Raises:
        AlignmentError: The source has no tokens, or the two texts have nothing in common.
    """
    blocks = _common_blocks(source_text, target_text)
    if target_spans and (not source_spans or (target_text and not blocks)):
        raise AlignmentError(
            f"The source has read {source_text[:60]!r} ({len(source_spans)} tokens, {len(source_text)} characters), "
            f"the target is to read {target_text[:60]!r} ({len(target_spans)} tokens, {len(target_text)} characters): "
            "the two have no text in common, so no source token can speak for a target token. Give the prompt that "
            "contains what the source has read, or let the target prefill it."
        )
    source_start, source_end = ordered(source_spans)
    target_start, target_end = ordered(target_spans)
    zero_width = target_start == target_end
    last, begin, mapped = _map_characters(blocks, target_start, target_end)

    # Odd places are characters, even ones lie between them. Where several source tokens share a place, zero-width
    # tokens (two BOS) pair up in order, and everything else listens to the last of them.
    source_place = 2 * source_start + (source_start < source_end)
    target_place = 2 * last + 1 + (zero_width | ~mapped)
    stride = len(source_spans) + len(target_spans) + 1
    target_rank = torch.where(zero_width & mapped, _rank(target_place), stride - 1)
    source_key, target_key = source_place * stride + _rank(source_place), target_place * stride + target_rank
    source_index = (torch.searchsorted(source_key, target_key, right=True) - 1).clamp(min=0)

    chosen_end, chosen_zero_width = source_end[source_index], (source_start == source_end)[source_index]
    ends_together = chosen_end == last + 1
    # A normaliser may drop the last character (an accent, a space); the token is still about the others.
    aligned = mapped & (chosen_zero_width == zero_width) & torch.where(zero_width, ends_together, chosen_end > begin)
    return TokenAlignment(source_index, aligned, aligned & ends_together, zero_width)


def _rank(place: torch.Tensor) -> torch.Tensor:
    """How many tokens at the same place come before each token."""
    return torch.arange(len(place)) - torch.searchsorted(place, place)


def _map_characters(
    blocks: list[tuple[int, int, int]], starts: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The source characters of each target token's last and first character, and whether the last one has any; one
    without is given the end of the block before it (-1 if there is none).
    """
    if not blocks:
        return torch.full_like(ends, -1), torch.full_like(ends, -1), ends == 0
    block_source, block_target, block_length = torch.tensor(blocks).T.contiguous()
    last = ends - 1
    block = torch.searchsorted(block_target, last, right=True) - 1
    before_all = block < 0
    block = block.clamp(min=0)
    offset = torch.minimum(last - block_target[block], block_length[block] - 1)
    source = torch.where(before_all, -1, block_source[block] + offset)
    # A zero-width token at the very beginning has no character before it and stands at the beginning of both texts.
    mapped = torch.where(before_all, ends == 0, last - block_target[block] == offset)
    begin = source - torch.minimum(offset, (ends - starts - 1).clamp(min=0))
    return source, begin, mapped


def _common_blocks(source: str, target: str) -> list[tuple[int, int, int]]:
    """Common parts of two texts, in order: `(source_start, target_start, length)` in characters."""
    shorter = min(len(source), len(target))
    whole = source[:shorter] == target[:shorter]
    prefix = shorter if whole else len(commonprefix([source, target]))
    blocks = [(0, 0, prefix)] if prefix else []
    if whole:
        return blocks
    source_pieces, target_pieces = _PIECE.findall(source, prefix), _PIECE.findall(target, prefix)
    source_at = list(accumulate(map(len, source_pieces), initial=prefix))
    target_at = list(accumulate(map(len, target_pieces), initial=prefix))
    for first, second, count in _common_pieces(source_pieces, target_pieces):
        length = source_at[first + count] - source_at[first]
        # A short text that is all there is (behind a template, say) is no coincidence.
        if length >= min(_MIN_BLOCK_CHARACTERS, shorter):
            blocks.append((source_at[first], target_at[second], length))
    return blocks


def _common_pieces(source: list[str], target: list[str]) -> Iterator[tuple[int, int, int]]:
    """
    Common runs of two lists, in order: first around anchors, then what difflib finds between them.

    Anchors keep it nearly linear; difflib alone takes minutes for a long context, where any space could be any other.
    """
    source_done = target_done = 0
    for first, second in [*_anchors(source, target), (len(source), len(target))]:
        if first < source_done or second < target_done:
            continue
        first_end, second_end = first, second
        while first > source_done and second > target_done and source[first - 1] == target[second - 1]:
            first, second = first - 1, second - 1
        while first_end < len(source) and second_end < len(target) and source[first_end] == target[second_end]:
            first_end, second_end = first_end + 1, second_end + 1
        if (first - source_done) * (second - target_done) <= _MAX_GAP_PAIRS:
            gap = SequenceMatcher(None, source[source_done:first], target[target_done:second], autojunk=False)
            for block in gap.get_matching_blocks():
                yield source_done + block.a, target_done + block.b, block.size
        yield first, second, first_end - first
        source_done, target_done = first_end, second_end


def _anchors(source: list[str], target: list[str]) -> list[tuple[int, int]]:
    """Places of runs of pieces that occur once in each list, in an order that both lists have them in."""
    source_places, target_places = _single_runs(source), _single_runs(target)
    source_runs, target_runs = list(source_places), list(target_places)
    blocks = SequenceMatcher(None, source_runs, target_runs, autojunk=False).get_matching_blocks()
    runs = chain.from_iterable(source_runs[block.a : block.a + block.size] for block in blocks)
    return [(source_places[run], target_places[run]) for run in runs]


def _single_runs(pieces: list[str]) -> dict[tuple[str, ...], int]:
    runs = list(zip(*(pieces[i:] for i in range(_ANCHOR_PIECES)), strict=False))
    counts = Counter(runs)
    return {run: place for place, run in enumerate(runs) if counts[run] == 1}
