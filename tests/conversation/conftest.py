import copy

import pytest

from hf_kvtransfer import Conversation

from ..tiny_models import plant, planted_mapper, tiny_model
from .replies import UNGATED


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "Answer in short.\n{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def models(tokenizers):
    """Three models of one function, with windows, and of one template: what one has read is what all would read."""
    tokenizer = copy.deepcopy(tokenizers["bpe"])
    tokenizer.chat_template = CHATML
    model = tiny_model("gemma3", max_position_embeddings=2048, sliding_window=24)
    return {name: (plant(model, seed=seed), tokenizer) for seed, name in enumerate("abc")}


@pytest.fixture(scope="session")
def templates(models):
    """The same models, each with a template of its own; the third has none."""
    found = {}
    for (name, (model, tokenizer)), template in zip(models.items(), (CHATML, BRACKETS, None), strict=True):
        found[name] = model, copy.deepcopy(tokenizer)
        found[name][1].chat_template = template
    return found


@pytest.fixture(scope="session")
def mappers(models):
    return {
        (source, target): planted_mapper(models[source][0], models[target][0])
        for source in models
        for target in models
        if source != target
    }


@pytest.fixture
def conversation(models, mappers):
    return Conversation(models, mappers, **UNGATED)
