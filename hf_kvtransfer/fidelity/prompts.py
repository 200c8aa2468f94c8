"""Token ids of a prompt and of what follows it."""

from transformers import PreTrainedTokenizerBase

from ..alignment.spans import Span, encode_with_spans


class PromptEncoder:
    """
    A tokenizer as a prompt goes through it: what it puts in front of a text (a BOS) stands there exactly once, also
    where the text is a chat template's and has it already, and nothing is put behind the text, which goes on.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        bare, full = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        first = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        self.front, self._behind = full[:first], full[first + len(bare) :]

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids of a prompt, and the characters that each stands for."""
        ids, spans = encode_with_spans(self.tokenizer, text)
        front, end = len(self.front), len(ids) - len(self._behind)
        begin = front if ids[front : 2 * front] == self.front else 0
        return ids[begin:end], spans[begin:end]

    def continuation(self, context: str, context_ids: list[int], text: str, max_tokens: int) -> tuple[list[int], int]:
        """
        The first ids of a text that follows a context, and how many characters they stand for.

        Args:
            context (`str`):
                What stands before the text.
            context_ids (`list[int]`):
                Its ids, as [`PromptEncoder.encode`] gives them.
            text (`str`):
                What follows.
            max_tokens (`int`):
                At most so many ids.
        """
        ids, spans = self.encode(context + text)
        first, begin = len(context_ids), len(context)
        if ids[:first] != context_ids:
            # Written together, some token reaches over the boundary: a model that continues from the context cannot.
            ids, spans = self.encode(text)
            first, begin = len(self.front), 0
        ids, spans = ids[first : first + max_tokens], spans[first : first + max_tokens]
        return ids, spans[-1][1] - begin if spans else 0

    def text_to_read(self, rendering: str) -> str:
        """A chat template's text without what the tokenizer itself will put in front of it."""
        return rendering.removeprefix("".join(self.tokenizer.convert_ids_to_tokens(self.front)))
