"""Replies of planted models that say what is wanted, and are compared with what the models make of a prompt alone."""

import torch
from transformers import LogitsProcessor

from hf_kvtransfer import FidelityGate

from ..tiny_tokenizers import SENTENCES


# What the models are made to say: what they would say themselves is often no text.
ANSWERS = ["It gives them silt, water and fish.", "The river carries silt.", "Where the farmers wait.", "Zwölf."]
UNGATED = {"gate": FidelityGate(strict=False), "min_tokens": 1}
QUESTIONS = [*SENTENCES[:3], "And the fish?", "user", SENTENCES[4], "What is area(width, height)?"]


class Saying(LogitsProcessor):
    """Lets a model say what is wanted, whatever its logits are."""

    def __init__(self, ids):
        self.ids, self.said = ids, 0

    def __call__(self, input_ids, scores):
        only = torch.full_like(scores, -torch.inf)
        only[:, self.ids[self.said]] = 0
        self.said += 1
        return only


def reply(conversation, name, message=None, **options):
    ids = conversation.models[name][1](ANSWERS[len(conversation.messages) // 2 % len(ANSWERS)]).input_ids
    options = {"max_new_tokens": len(ids), "logits_processor": [Saying(ids)], "do_sample": False} | options
    return conversation.reply(name, message, output_logits=True, return_dict_in_generate=True, **options)


def assert_native(conversation, name, answer):
    """The logits of a reply are those of a model that has read all of its prompt itself, and the counts add up."""
    model, _ = conversation.models[name]
    sequences, logits = answer.output.sequences, torch.stack(answer.output.logits, 1)
    with torch.no_grad():
        native = model(sequences[:, :-1]).logits[:, -logits.shape[1] :]
    torch.testing.assert_close(logits, native, rtol=0, atol=1e-3)
    report = answer.report
    prompt = sequences.shape[1] - logits.shape[1]
    assert report.kept_tokens + sum(report.translated_tokens.values()) + report.native_tokens == prompt
    assert report.reply_tokens == logits.shape[1]
