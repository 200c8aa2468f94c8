"""Dialogues as a model is served them: through its chat template, or plainly where it has none."""

from collections.abc import Iterator, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import EvaluationDataError


ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, str]


def render_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turns: Sequence[int]
) -> list[tuple[str, str]]:
    """
    What a model has read before it replies, and the reply, for several turns of one dialogue.

    A model with a chat template reads what the template writes, with the generation prompt. Many templates know no
    `tool` or `system` role: they raise, leave such a message out, or write it in another form. Its content is then
    given as a user message, and user messages that follow each other are merged where the template insists on
    alternating roles, so that the text of the dialogue is the same for both models of a pair.

    A model without a template reads `"User: ...\\n\\nAssistant: ...\\n\\nUser: ...\\n\\nAssistant:"`, and replies
    behind a space.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer, which has its chat template.
        messages (`Sequence[dict[str, str]]`):
            The dialogue: `role`, one of `ROLES`, and `content` of each message.
        turns (`Sequence[int]`):
            Indices of the messages that are replies.

    Returns:
        `list[tuple[str, str]]`: For each turn the context as text and the reply, without white space around it.

    Raises:
        `EvaluationDataError`: the chat template does not take the dialogue in any of these forms.
    """
    replies = [messages[turn]["content"].strip() for turn in turns]
    if not getattr(tokenizer, "chat_template", None):
        return [
            (f"{_plain(messages[:turn])}Assistant:", f" {reply}") for turn, reply in zip(turns, replies, strict=True)
        ]
    # One form for all turns, so that each context begins with the one before it.
    contexts = _in_accepted_form(tokenizer, [messages[:turn] for turn in turns], add_generation_prompt=True)
    return list(zip(contexts, replies, strict=True))


def render_dialogue(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """
    A whole dialogue as a model with this tokenizer reads it, in the form that [`render_turns`] gives to its contexts.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        messages (`Sequence[dict[str, str]]`):
            `role` and `content` of each message.

    Raises:
        `EvaluationDataError`: the chat template does not take the dialogue.
    """
    if not getattr(tokenizer, "chat_template", None):
        return _plain(messages)
    return _in_accepted_form(tokenizer, [messages], add_generation_prompt=False)[0]


def _in_accepted_form(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Sequence[Message]], add_generation_prompt: bool
) -> list[str]:
    refusal = None
    for as_user, merged in (((), False), (("tool",), False), (("tool",), True), (("tool", "system"), True)):
        try:
            return [_templated(tokenizer, _in_form(d, as_user, merged), add_generation_prompt) for d in dialogues]
        except (TemplateError, TypeError, ValueError) as error:
            refusal = refusal or error
    raise EvaluationDataError(
        f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__} does not take this dialogue: "
        f"{refusal}. Change the dialogue so that user and assistant alternate, beginning with the user."
    ) from refusal


def _plain(messages: Sequence[Message]) -> str:
    return "".join(f"{m['role'].capitalize()}: {m['content'].strip()}\n\n" for m in messages)


def _templated(tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool) -> str:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    for message in messages:
        # Of a reply, templates drop the reasoning on purpose.
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise ValueError(f"it leaves out or rewrites {message['content'].strip()[:60]!r} ({message['role']})")
    return text


def _in_form(messages: Sequence[Message], as_user: Sequence[str], merged: bool) -> list[Message]:
    renamed = ({**m, "role": "user"} if m["role"] in as_user else dict(m) for m in messages)
    return list(_merge(renamed)) if merged else list(renamed)


def _merge(messages: Iterator[Message]) -> Iterator[Message]:
    """Messages of one role that follow each other as one, with a blank line between them."""
    last = next(messages)
    for message in messages:
        if message["role"] == last["role"]:
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            yield last
            last = message
    yield last
