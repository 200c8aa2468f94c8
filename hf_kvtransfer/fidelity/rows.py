"""The kinds of rows that evaluation data has, and what is wrong with one that is none of them."""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any

from ..errors import EvaluationDataError
from .chat import ROLES, Message


KINDS = (
    '{"text"}, {"context", "continuation"}, {"messages"}, {"context", "endings", "label"}, {"question", "answer"} '
    'with or without "context", {"input_ids"}, each with an optional "capability"; a string for {"text"}; a list of '
    'token ids for {"input_ids"}'
)


# Answers to other questions, among which a question's own is to be found.
NUM_WRONG_ANSWERS = 3

# An ending that begins so belongs to the last word of its context, all others stand behind a space.
_ATTACHED = ",.;:!?'’)]}%…"


@dataclasses.dataclass(frozen=True)
class Text:
    """Running text, to be cut into a context and its continuation."""

    capability: str
    text: str


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The same as ids of the one vocabulary that both models have."""

    capability: str
    input_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """Messages, with `role` and `content` only."""

    capability: str
    messages: list[Message]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A context and what may follow it, verbatim; with a single ending, what follows it."""

    capability: str
    context: str
    endings: list[str]
    label: int = 0


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and its answer, and what is read before them."""

    capability: str
    question: str
    answer: str
    context: str | None = None


Row = Text | TokenIds | Dialogue | Choice | Question


def parse_row(row: Any, capability: str | None = None) -> Row:
    """
    Check a row and say what it is.

    Args:
        row (`str`, `Sequence[int]`, `torch.LongTensor` or `Mapping`):
            What a user's file or iterable holds.
        capability (`str`, *optional*):
            For a row that names none.

    Raises:
        `EvaluationDataError`: the row is of no known kind, or holds something that cannot be used.
    """
    if isinstance(row, str):
        row = {"text": row}
    elif isinstance(row, list | tuple) or hasattr(row, "tolist"):
        row = {"input_ids": row}
    elif not isinstance(row, Mapping):
        raise EvaluationDataError(f"a row of type {type(row).__name__} is of no known kind. Rows are {KINDS}.")
    # A table of several kinds of rows has empty columns.
    row = {field: value for field, value in row.items() if value is not None}
    capability = row.get("capability", capability)
    if capability is not None and not (isinstance(capability, str) and capability.strip()):
        raise EvaluationDataError(f"`capability` must be a name, got {capability!r}.")
    for fields, default, parse in _PARSERS:
        if row.keys() >= set(fields):
            return parse(capability or default, *(row[field] for field in fields))
    if "turns" in row:
        raise EvaluationDataError(
            "`turns` are questions without replies (as in MT-Bench), so there is nothing to score. Let a model answer "
            'them and give {"messages": [{"role", "content"}, ...]} with the replies in it.'
        )
    raise EvaluationDataError(f"a row with the fields {sorted(map(str, row))} is of no known kind. Rows are {KINDS}.")


def ask_questions(rows: list[tuple[int, Row]]) -> Iterator[tuple[int, Text | TokenIds | Dialogue | Choice]]:
    """Rows in which each question has become a choice between its answer and those of the questions after it."""
    wrong_answers = _wrong_answers([row.answer for _, row in rows if isinstance(row, Question)])
    asked = 0
    for number, row in rows:
        if isinstance(row, Question):
            wrong = wrong_answers[asked]
            label = asked % (len(wrong) + 1)
            endings = [f" {answer}" for answer in (*wrong[:label], row.answer, *wrong[label:])]
            before = "" if row.context is None else f"{row.context}\n\n"
            row = Choice(row.capability, f"{before}Question: {row.question}\nAnswer:", endings, label)
            asked += 1
        yield number, row


def _wrong_answers(answers: list[str]) -> list[list[str]]:
    """For each answer the next ones that differ, from the end on to the beginning; none if there are not enough."""
    # Different answers in the order in which they come next, seen from the end. Walked backwards, so that many
    # questions with few answers, as yes and no, are not searched again for each of them.
    upcoming = OrderedDict.fromkeys(answers)
    if len(upcoming) <= NUM_WRONG_ANSWERS:
        return [[] for _ in answers]
    wrong = []
    for answer in reversed(answers):
        nearest = itertools.islice(upcoming, NUM_WRONG_ANSWERS + 1)
        wrong.append([other for other in nearest if other != answer][:NUM_WRONG_ANSWERS])
        upcoming.move_to_end(answer, last=False)
    return wrong[::-1]


def _text(capability: str, text: Any) -> Text:
    if not isinstance(text, str):
        raise EvaluationDataError(f"`text` must be a string, got {text!r:.80}.")
    return Text(capability, text)


def _token_ids(capability: str, input_ids: Any) -> TokenIds:
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if not isinstance(ids, list | tuple):
        raise EvaluationDataError(f"token ids must be a list or a tensor of one dimension, got {input_ids!r:.80}.")
    for place, number in enumerate(ids):
        if not isinstance(number, Integral) or isinstance(number, bool) or int(number) < 0:
            raise EvaluationDataError(
                f"token ids must be whole numbers from 0, in one dimension, but number {place} is {number!r:.80}."
            )
    return TokenIds(capability, [int(number) for number in ids])


def _dialogue(capability: str, messages: Any) -> Dialogue:
    if not isinstance(messages, list | tuple) or not messages:
        raise EvaluationDataError(f"`messages` must be a list of messages, got {messages!r:.80}.")
    parsed = [parse_message(number, message) for number, message in enumerate(messages, start=1)]
    if all(message["role"] != "assistant" for message in parsed):
        raise EvaluationDataError("the dialogue has no message of the assistant, so there is no reply to score.")
    return Dialogue(capability, parsed)


def parse_message(number: int, message: Any) -> Message:
    """
    Check a message of a dialogue.

    Args:
        number (`int`):
            Its place in the dialogue, from 1.
        message (`Mapping`):
            What a user's data holds.

    Raises:
        `EvaluationDataError`: it has no role or no content, or ones that cannot be used.
    """
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise EvaluationDataError(f"message {number} must have a `role` and a `content`, got {message!r:.80}.")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise EvaluationDataError(f"message {number} has the unknown role {role!r}. Roles are {', '.join(ROLES)}.")
    if role == "system" and number > 1:
        raise EvaluationDataError(
            f"message {number} has the role 'system', with which a dialogue begins. Give each dialogue its own row."
        )
    if content is not None and not isinstance(content, str):
        raise EvaluationDataError(
            f"message {number} (role {role!r}): `content` must be a string, got {content!r:.80}."
        )
    if not (content or "").strip():
        raise EvaluationDataError(
            f"message {number} (role {role!r}) is empty. Leave it out, or give a tool call's text as its content."
        )
    return {"role": role, "content": content}


def _continuation(capability: str, context: Any, continuation: Any) -> Choice:
    return Choice(capability, _filled("context", context), [_filled("continuation", continuation)])


def _choice(capability: str, context: Any, endings: Any, label: Any) -> Choice:
    context = _filled("context", context)
    if not isinstance(endings, list | tuple) or len(endings) < 2:
        raise EvaluationDataError(f"`endings` must be a list of at least 2 texts, got {endings!r:.80}.")
    endings = [_filled(f"endings[{number}]", ending) for number, ending in enumerate(endings)]
    if not isinstance(label, Integral) or isinstance(label, bool) or not 0 <= int(label) < len(endings):
        raise EvaluationDataError(
            f"`label` must be the index of the right ending, a number from 0 to {len(endings) - 1}, got {label!r:.80}."
        )
    apart = not context[-1].isspace()
    endings = [f" {text}" if apart and not (text[0].isspace() or text[0] in _ATTACHED) else text for text in endings]
    return Choice(capability, context, endings, int(label))


def _question(capability: str, question: Any, answer: Any, context: Any = "") -> Question:
    # Left empty in data where only some questions have one.
    before = None if context == "" else _filled("context", context)
    return Question(capability, _filled("question", question), _filled("answer", answer), before)


def _filled(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise EvaluationDataError(f"`{name}` must be a text that is not empty, got {text!r:.80}.")
    return text


# What tells a kind, the capability that its rows stand for if they name none, and the check.
_PARSERS: tuple[tuple[tuple[str, ...], str, Callable[..., Row]], ...] = (
    (("messages",), "dialogue", _dialogue),
    (("context", "endings", "label"), "choice", _choice),
    (("context", "continuation"), "text", _continuation),
    (("question", "answer", "context"), "reasoning", _question),
    (("question", "answer"), "reasoning", _question),
    (("input_ids",), "text", _token_ids),
    (("text",), "text", _text),
)
