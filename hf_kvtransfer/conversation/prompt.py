"""A conversation as one model reads it: its ids, and where each message stands in them."""

import dataclasses
import os
import re
import sys
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..alignment.spans import Span, character_spans
from ..errors import ConversationError, EvaluationDataError
from ..fidelity.chat import Message, render_dialogue, render_turns
from ..fidelity.prompts import PromptEncoder


# Where a model without a chat template has no sign for the end of its reply, it goes on with the next message.
_NEXT_MESSAGE = re.compile(r"\n\n(?:User|Assistant|Tool|System):")


@dataclasses.dataclass
class ReadText:
    """
    A text that a model reads or has read.

    Args:
        ids (`list[int]`):
            Its tokens.
        text (`str`), spans (`list[tuple[int, int]]`):
            The text, and the characters that each token stands for.
        messages (`list[dict[str, str]]`):
            The messages in it.
        places (`list[tuple[int, int] | None]`):
            The characters of each message's content, `None` where a chat template leaves it out or rewrites it.
    """

    ids: list[int]
    text: str
    spans: list[Span]
    messages: list[Message]
    places: list[Span | None]

    def shared_messages(self, messages: Sequence[Message]) -> int:
        """How many of its first messages are the first of `messages`."""
        pairs = enumerate(zip(self.messages, messages, strict=False))
        return next((i for i, (own, other) in pairs if own != other), min(len(self.messages), len(messages)))

    def with_reply(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> "ReadText":
        """This prompt and a reply behind it: `ids` are the tokens of both."""
        new = list(ids[len(self.ids) :])
        text, spans = character_spans(tokenizer, new)
        content = reply_text(tokenizer, new)
        # Bytes that are no character are shown alike, whatever they are: the text does not say what was read.
        begin = text.find(content) if content and "\ufffd" not in content else -1
        first = len(self.text)
        place = None if begin < 0 else (first + begin, first + begin + len(content))
        return ReadText(
            list(ids),
            self.text + text,
            self.spans + [(first + start, first + end) for start, end in spans],
            [*self.messages, {"role": "assistant", "content": content}],
            [*self.places, place],
        )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], before: ReadText | None = None
) -> ReadText:
    """
    What a model reads before it replies.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer, with its chat template. Without one the dialogue is written plainly, see
            [`render_turns`].
        messages (`Sequence[dict[str, str]]`):
            All that was said.
        before ([`ReadText`], *optional*):
            What the model has read before: places in what is the same need not be looked for.

    Raises:
        `EvaluationDataError`: the chat template does not take the messages.
    """
    ((text, _),) = render_turns(tokenizer, [*messages, {"role": "assistant", "content": "."}], [len(messages)])
    ids, spans = PromptEncoder(tokenizer).encode(text)
    places: list[Span | None] = []
    if before is not None:
        known = before.places[: before.shared_messages(messages)]
        same = (place is not None and text[: place[1]] == before.text[: place[1]] for place in known)
        places = known[: next((i for i, is_same in enumerate(same) if not is_same), len(known))]
    start = _end_of(tokenizer, messages[: len(places)], text)
    for number, message in enumerate(messages[len(places) :], start=len(places) + 1):
        # The last occurrence in what this message adds: a template's own words come first.
        end = max(_end_of(tokenizer, messages[:number], text), start)
        content = message["content"].strip()
        place = text.rfind(content, start, end) if content else -1
        places.append(None if place < 0 else (place, place + len(content)))
        start = end
    return ReadText(ids, text, spans, [dict(message) for message in messages], places)


def _end_of(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> int:
    """How far a rendering begins as that of its first messages alone."""
    if not messages:
        return 0
    try:
        first = render_dialogue(tokenizer, messages)
    except EvaluationDataError:  # a template may refuse them alone
        return 0
    return len(first) if text.startswith(first) else len(os.path.commonprefix([first, text]))


def encode_reply(tokenizer: PreTrainedTokenizerBase, prompt: ReadText, reply: str) -> list[int]:
    """
    Ids of a reply behind its prompt.

    Raises:
        `ConversationError`: it has none.
    """
    messages = [*prompt.messages, {"role": "assistant", "content": reply}]
    ((_, text),) = render_turns(tokenizer, messages, [len(prompt.messages)])
    ids, _ = PromptEncoder(tokenizer).continuation(prompt.text, prompt.ids, text, max_tokens=sys.maxsize)
    if not reply.strip() or not ids:
        raise ConversationError(f"The reply {reply!r} has no tokens.")
    return ids


def reply_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """What a model has said, without special tokens, and without what it has put into the mouths of others."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if not getattr(tokenizer, "chat_template", None):
        text = _NEXT_MESSAGE.split(text)[0]
    return text.strip()
