"""Questions about contexts that were read earlier, each alone, and what a method is asked for them."""

import dataclasses
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from ..fidelity.prompts import PromptEncoder


@dataclasses.dataclass(frozen=True)
class ReuseQuestion:
    """
    A question about some contexts.

    Args:
        chunks (`tuple[str, ...]`):
            The contexts, in the order in which the prompt has them: retrieved passages, other agents' reports.
        question (`str`):
            What follows them.
        answer (`str`):
            The right answer, with the space before it.
        num_sources (`int`):
            How many of the chunks are needed to answer.

    Raises:
        `ValueError`: there are no chunks, more are needed than there are, or a text is empty.
    """

    chunks: tuple[str, ...]
    question: str
    answer: str
    num_sources: int

    def __post_init__(self):
        if isinstance(self.chunks, str) or not self.chunks or not all([*self.chunks, self.question, self.answer]):
            raise ValueError(f"`chunks`, `question` and `answer` are texts that are not empty, got {self}.")
        if not 1 <= self.num_sources <= len(self.chunks):
            raise ValueError(f"`num_sources` is {self.num_sources}, of {len(self.chunks)} chunks.")


@dataclasses.dataclass(frozen=True)
class ReuseRequest:
    """
    A question as a target reads it.

    Args:
        input_ids (`torch.LongTensor`):
            The prompt, `[1, tokens]`: the chunks, each tokenized alone, so that it has the same tokens wherever it
            stands, then the question.
        ranges (`list[tuple[int, int]]`):
            Tokens of each chunk; those of the first include what the tokenizer puts in front of a prompt.
        answer_ids (`list[int]`):
            Of the answer.
        num_front (`int`):
            First tokens that the tokenizer puts in front of any prompt.
    """

    input_ids: torch.Tensor
    ranges: list[tuple[int, int]]
    answer_ids: list[int]
    num_front: int

    @classmethod
    def make(cls, question: ReuseQuestion, encoder: PromptEncoder) -> "ReuseRequest":
        """Tokenize a question."""
        ids: list[int] = []
        ranges = []
        front = len(encoder.front)
        for chunk in question.chunks:
            start = len(ids)
            ids += encoder.encode(chunk)[0][front if ids else 0 :]
            ranges.append((start, len(ids)))
        asked = encoder.encode(question.question)[0]
        answer = encoder.continuation(question.question, asked, question.answer, len(question.answer))[0]
        return cls(torch.tensor([ids + asked[front:]]), ranges, answer, front)

    def without_context(self) -> torch.Tensor:
        """The question alone, `[1, tokens]`, behind what the tokenizer puts in front of a prompt."""
        return torch.cat([self.input_ids[:, : self.num_front], self.input_ids[:, self.ranges[-1][1] :]], dim=1)


class ReuseMethod(Protocol):
    """Makes caches of chunks once, and for each request one cache of them."""

    def build(self, chunk: str) -> Any:
        """What is kept of a chunk: made once, whatever will be asked."""
        ...

    def held_bytes(self, built: Any) -> int:
        """What that takes while it is kept."""
        ...

    def prepare(self, request: ReuseRequest, built: list[Any]) -> Cache:
        """
        A cache of the prompt's first tokens for the target, which reads the rest.

        Args:
            request ([`ReuseRequest`]):
                What is asked.
            built (`list`):
                What is kept of its chunks, in order.
        """
        ...
