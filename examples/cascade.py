"""
A cascade: a small model answers, and where it is not sure of itself, a larger one answers instead. The larger one does
not read the conversation: it is handed what the small one has read.

    python examples/cascade.py "What is silt?" "Where does it come from?"
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import Conversation, FidelityGate
from hf_kvtransfer.demo_models import load_demo_model


MAPPER = Path(__file__).parents[1] / "mappers" / "smollm2-135m-instruct--gemma-3-270m"


def confidence(reply):
    """The mean probability that a model gave to the tokens of its reply."""
    logits = torch.cat(reply.output.logits).float()
    chosen = reply.output.sequences[0, -len(logits) :, None]
    return logits.softmax(-1).gather(-1, chosen).mean().item()


def answer(conversation, question, sure, **options):
    """A reply of the small model, or of the large one if the small one is less sure than `sure`."""
    reply = conversation.reply("small", question, output_logits=True, return_dict_in_generate=True, **options)
    if confidence(reply) >= sure:
        return reply
    conversation.messages.pop()  # nobody is to go on from this reply
    return conversation.reply("large", **options)


def load(name):
    """A model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--small", help="folder or Hub id, by default SmolLM2-135M-Instruct")
    parser.add_argument("--large", help="by default Gemma 3 270M")
    parser.add_argument("--mapper", default=str(MAPPER), help="from the small to the large one: folder or Hub id")
    parser.add_argument("--sure", type=float, default=0.6, help="mean probability of a reply that is believed")
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    models = {
        "small": load(arguments.small) if arguments.small else load_demo_model("smollm2-135m-instruct"),
        "large": load(arguments.large) if arguments.large else load_demo_model("gemma-3-270m"),
    }
    # What questions ask of the mapper. For long dialogues, which its evidence has too, the shipped one will not do.
    gate = FidelityGate(capabilities=("everyday text", "knowledge", "reasoning"))
    conversation = Conversation(models, {("small", "large"): arguments.mapper}, gate=gate)
    for question in arguments.questions:
        reply = answer(conversation, question, arguments.sure, max_new_tokens=arguments.new_tokens, do_sample=False)
        print(f"> {question}\n{reply.report.model}: {reply.text}\n    {reply.report}\n")


if __name__ == "__main__":
    main()
