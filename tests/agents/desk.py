"""A dialogue, and a backend, that need no model."""

import re

from hf_kvtransfer.agents import AgentReply, CacheHandle, CacheUse


class SmallTalk:
    """Says so many things, whatever it is told. Its score is the share of replies that hold a word."""

    def __init__(self, said=("The farmers wait.", "And the flood?", "It gives them silt."), word=""):
        self.said, self.word, self.replies = list(said), word, []

    @property
    def done(self):
        return len(self.replies) == len(self.said)

    @property
    def score(self):
        return sum(self.word in reply for reply in self.replies) / max(len(self.said), 1)

    def observe(self):
        messages = []
        for number, said in enumerate(self.said[: len(self.replies) + 1]):
            messages.append({"role": "user", "content": said})
            if number < len(self.replies):
                messages.append({"role": "assistant", "content": self.replies[number]})
        return messages

    def act(self, text):
        self.replies.append(text)


class ScriptedBackend:
    """Replies by functions of the dialogue, tokens are characters, and each model's cache holds what it was given."""

    def __init__(self, **replies):
        self.replies, self.handles, self.resets = replies, {}, 0

    @property
    def models(self):
        return set(self.replies)

    def reset(self):
        self.handles, self.resets = {}, self.resets + 1

    def tokens(self, model, messages):
        return [ord(character) for character in "\n".join(message["content"] for message in messages)]

    def generate(self, model, messages):
        read = len(self.tokens(model, messages))
        text = self.replies[model](messages)
        held = len(self.handles[model].readers) if model in self.handles else 0
        self.handles[model] = CacheHandle([model] * (read + len(text)))
        return AgentReply([ord(character) for character in text], text, CacheUse(held, {}, read - held))


def careful_clerk(messages):
    """Plays the retail desk by its rules."""
    said = [message["content"] for message in messages]
    number = next((re.search(r"It is order (\d+)", text).group(1) for text in said if "It is order" in text), None)
    if number is None:
        return "SAY Which order is it?"
    order = next((text for text in said if text.startswith(f"Order {number}: ")), None)
    if order is None:
        return f"LOOKUP {number}"
    status = re.search(r"(processing|shipped|delivered)", order).group(1)
    days = int(re.search(r"(\d+) days ago|$", order).group(1) or 0)
    wish = said[1]
    if "return" in wish and status == "delivered" and days <= 30 and f"Order {number} is returned." not in said:
        return f"RETURN {number}"
    if "cancel" in wish and status == "processing" and f"Order {number} is cancelled." not in said:
        return f"CANCEL {number}"
    if "stand" in wish and f"SAY Your order is {status}." not in said:
        return f"SAY Your order is {status}."
    return "DONE"
