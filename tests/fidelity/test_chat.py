import copy

import pytest

from hf_kvtransfer import EvaluationDataError
from hf_kvtransfer.fidelity.chat import render_turns
from hf_kvtransfer.fidelity.prompts import PromptEncoder


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Gemma's: writes the BOS, trims, and insists on user and assistant in turn.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('Unknown role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] | trim }}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does the delta give?"},
    {"role": "tool", "content": '{"delta": "silt"}'},
    {"role": "assistant", "content": "It gives silt. "},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Fish."},
]
TURNS = [3, 5]


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_without_a_template_a_dialogue_is_plain_text(tokenizers):
    first, second = render_turns(tokenizers["bpe"], DIALOGUE, TURNS)
    assert first == (
        'System: Be brief.\n\nUser: What does the delta give?\n\nTool: {"delta": "silt"}\n\nAssistant:',
        " It gives silt.",
    )
    assert second == (f"{first[0]}{first[1]}\n\nUser: And then?\n\nAssistant:", " Fish.")


def test_a_template_is_used_as_it_is(tokenizers):
    tokenizer = with_template(tokenizers["bpe"], CHATML)
    rendered = render_turns(tokenizer, DIALOGUE, TURNS)
    for (context, reply), turn in zip(rendered, TURNS, strict=True):
        expected = tokenizer.apply_chat_template(DIALOGUE[:turn], add_generation_prompt=True, tokenize=False)
        assert context == expected
        assert reply == DIALOGUE[turn]["content"].strip()
    assert rendered[1][0].startswith(rendered[0][0] + rendered[0][1])


def test_roles_that_a_template_refuses_become_user_messages(tokenizers):
    tokenizer = with_template(tokenizers["unigram"], STRICT)
    first, second = render_turns(tokenizer, DIALOGUE, TURNS)
    merged = 'Be brief.\n\nWhat does the delta give?\n\n{"delta": "silt"}'
    assert first == (f"<bos><user>{merged}</>\n<assistant>", "It gives silt.")
    assert second == (f"{first[0]}{first[1]}</>\n<user>And then?</>\n<assistant>", "Fish.")


@pytest.mark.parametrize(
    "written", ["{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}", "{{ m['content'] | tojson }}"]
)
def test_a_template_that_hides_a_tool_s_answer_gets_it_as_a_user_message(tokenizers, written):
    template = "{% for m in messages %}[{{ m['role'] }}]"
    template += f"{{% if m['role'] == 'tool' %}}{written}{{% else %}}{{{{ m['content'] }}}}{{% endif %}}{{% endfor %}}"
    ((context, _),) = render_turns(with_template(tokenizers["bpe"], template), DIALOGUE, [3])
    assert context == '[system]Be brief.[user]What does the delta give?[user]{"delta": "silt"}'


def test_a_dialogue_that_a_template_cannot_take_is_refused(tokenizers):
    tokenizer = with_template(tokenizers["unigram"], STRICT)
    dialogue = [{"role": "assistant", "content": "Hello."}, *DIALOGUE[1:]]
    with pytest.raises(EvaluationDataError, match="chat template of .* does not take .*Roles must alternate"):
        render_turns(tokenizer, dialogue, [3])
    hides_all = with_template(tokenizers["bpe"], "{% for m in messages %}[{{ m['role'] }}]{% endfor %}")
    with pytest.raises(EvaluationDataError, match=r"leaves out or rewrites 'Be brief.' \(system\)"):
        render_turns(hides_all, DIALOGUE, TURNS)


def test_a_dialogue_is_not_changed(tokenizers):
    before = copy.deepcopy(DIALOGUE)
    render_turns(with_template(tokenizers["unigram"], STRICT), DIALOGUE, TURNS)
    assert before == DIALOGUE


@pytest.mark.parametrize("template", [STRICT, STRICT.replace("{{ bos_token }}", "")])
def test_one_bos_whether_the_template_writes_it_or_not(tokenizers, template):
    tokenizer = with_template(tokenizers["unigram"], template)
    encoder = PromptEncoder(tokenizer)
    ((context, _),) = render_turns(tokenizer, DIALOGUE, [3])
    ids, spans = encoder.encode(context)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert len(spans) == len(ids) and spans[-1][1] == len(context)
    # What the source's tokenizer is given comes out with one, too.
    read = tokenizer(encoder.text_to_read(context))["input_ids"]
    assert read.count(tokenizer.bos_token_id) == 1 and read[0] == tokenizer.bos_token_id
    if template == STRICT:
        conversation = [{"role": "user", "content": "\n\n".join(m["content"] for m in DIALOGUE[:3])}]
        as_served = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert ids == as_served


def test_nothing_is_put_behind_a_prompt(tokenizers):
    tokenizer = tokenizers["wordpiece"]
    text = "the farmers wait"
    ids, _ = PromptEncoder(tokenizer).encode(text)
    assert ids == tokenizer(text)["input_ids"][:-1]
    assert ids[0] == tokenizer.cls_token_id


@pytest.mark.parametrize("name", ["bpe", "unigram", "wordpiece"])
def test_a_continuation_goes_on_where_its_context_ends(tokenizers, name):
    encoder = PromptEncoder(tokenizers[name])
    context, text = "The farmers wait for the flood.", " The delta gives them water and fish."
    context_ids, _ = encoder.encode(context)
    ids, characters = encoder.continuation(context, context_ids, text, 100)
    assert context_ids + ids == encoder.encode(context + text)[0]
    assert characters == len(text)
    first, characters = encoder.continuation(context, context_ids, text, 3)
    assert first == ids[:3]
    assert 0 < characters < len(text)


def test_a_continuation_in_the_middle_of_a_token_stands_for_itself(tokenizers):
    encoder = PromptEncoder(tokenizers["bpe"])
    context_ids, _ = encoder.encode("The riv")
    assert encoder.encode("The river")[0][: len(context_ids)] != context_ids
    ids, characters = encoder.continuation("The riv", context_ids, "er carries silt", 100)
    assert tokenizers["bpe"].decode(ids) == "er carries silt"
    assert characters == len("er carries silt")
