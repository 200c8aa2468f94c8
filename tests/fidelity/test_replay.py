"""Arms of an evaluation, against the same written out without caches."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from torch.nn.functional import cosine_similarity
from transformers import DynamicCache

from hf_kvtransfer import (
    EvaluationDataError,
    KVGeometry,
    KVMapper,
    KVMapperConfig,
    PairMismatchError,
    SourceKV,
    TokenizerMismatchError,
)
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.fidelity import replay as replay_module
from hf_kvtransfer.fidelity.arms import ARMS
from hf_kvtransfer.fidelity.data import Passage
from hf_kvtransfer.fidelity.replay import NativeCache, Replay
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint

from ..tiny_models import FAMILIES, identity_mapper, plant, random_ids, tiny_model, with_native_layers
from .written_out import attention, id_passage, log_probs, loss, planted_mapper


# Longer than the window of the tiny Gemma.
CONTEXT, CONTINUATION = 45, 20
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def replay(model):
    return Replay(identity_mapper(model), model, model)


def ids_of(model, length, seed=0):
    return random_ids(model, 1, length, seed=seed)[0].tolist()


def donor_of(replay, ids):
    passage = id_passage([*ids, 5], len(ids))
    return replay.translate(passage, replay.read_source(passage))


def assert_score(score, model, read, passage, native_read):
    """A score on a cache that stands for the tokens `read`, against whole sequences."""
    (continuation,) = passage.continuations
    found, native = (log_probs(model, tokens, continuation) for tokens in (read, native_read))
    assert score.positions == len(continuation)
    assert score.loss == pytest.approx(loss(found, continuation), abs=TOLERANCE)
    assert score.agreement == int((found.argmax(-1) == native.argmax(-1)).sum())
    assert score.kl == pytest.approx((native.exp() * (native - found)).sum().item(), abs=TOLERANCE)
    assert score.chosen is None
    states = [attention(model, tokens, continuation) for tokens in (read, native_read)]
    cosine = [cosine_similarity(a, b, dim=-1).mean().item() for a, b in zip(*states, strict=True)]
    assert score.cosine == pytest.approx(cosine, abs=TOLERANCE)


def test_arms_of_a_text_are_those_written_out(model, replay):
    ids = ids_of(model, CONTEXT + CONTINUATION)
    passage, context = id_passage(ids, CONTEXT), ids[:CONTEXT]
    donor = ids_of(model, 38, seed=1)
    scores = replay.score(passage, donor=donor_of(replay, donor))
    assert tuple(scores) == ARMS

    native = scores["native"]
    rows = log_probs(model, context, ids[CONTEXT:])
    assert native.loss == pytest.approx(loss(rows, ids[CONTEXT:]), abs=TOLERANCE)
    assert (native.positions, native.agreement, native.kl, native.cosine) == (CONTINUATION, CONTINUATION, 0, [])
    # The mapper is exact, and the model's own states are raw ones.
    for arm in ("translated", "raw_source"):
        assert_score(scores[arm], model, context, passage, context)
        assert scores[arm].agreement == CONTINUATION
        assert scores[arm].cosine == pytest.approx([1] * 4, abs=1e-5)
    assert_score(scores["no_context"], model, context[:4] + context[-1:], passage, context)
    assert_score(scores["other_document"], model, donor[:-1] + context[-1:], passage, context)
    assert scores["random_map"].kl > 1


def test_a_longer_donor_is_cut(model, replay):
    ids, donor = ids_of(model, CONTEXT + 6), ids_of(model, 70, seed=1)
    scores = replay.score(id_passage(ids, CONTEXT), donor=donor_of(replay, donor), arms=["other_document"])
    assert tuple(scores) == ("native", "other_document")
    read = donor[: CONTEXT - 1] + ids[CONTEXT - 1 : CONTEXT]
    assert_score(scores["other_document"], model, read, id_passage(ids, CONTEXT), ids[:CONTEXT])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_planted_target(family):
    source = tiny_model(family)
    target = plant(source)
    mapper = planted_mapper(source, target)
    passage = id_passage(ids_of(source, CONTEXT + CONTINUATION), CONTEXT)
    scores = Replay(mapper, source, target).score(passage)
    assert "other_document" not in scores
    translated, native = scores["translated"], scores["native"]
    assert translated.loss == pytest.approx(native.loss, abs=10 * TOLERANCE)
    assert translated.agreement == CONTINUATION
    assert translated.kl < TOLERANCE
    assert min(translated.cosine) > 1 - TOLERANCE
    # The same states in another basis say nothing.
    assert scores["raw_source"].kl > 1
    assert scores["random_map"].kl > 1


@torch.no_grad()
def test_raw_source_states_behind_the_target_s_own_first_tokens():
    source, target = tiny_model("llama"), tiny_model("llama", seed=1)
    ids = ids_of(source, CONTEXT + CONTINUATION)
    scores = Replay(identity_mapper(source), source, target).score(id_passage(ids, CONTEXT))
    caches = [DynamicCache(config=m.config) for m in (source, target)]
    for m, cache in zip((source, target), caches, strict=True):
        read_into_cache(m, cache, torch.tensor([ids[: CONTEXT - 1]]))
    for layer, own in zip(caches[0].layers, caches[1].layers, strict=True):
        # The two models have the same rotary embedding.
        layer.keys[:, :, :4], layer.values[:, :, :4] = own.keys[:, :, :4], own.values[:, :, :4]
    logits = read_into_cache(target, caches[0], torch.tensor([ids[CONTEXT - 1 : -1]]), num_logits=CONTINUATION)
    expected = -logits[0].log_softmax(-1).gather(-1, torch.tensor(ids[CONTEXT:])[:, None]).sum()
    assert scores["raw_source"].loss == pytest.approx(expected.item(), abs=TOLERANCE)
    # The identity is no exact mapper of this pair, but it is what the raw states are.
    assert scores["translated"].loss == pytest.approx(scores["raw_source"].loss, abs=TOLERANCE)


def test_raw_source_needs_the_same_shapes():
    source, target = tiny_model("llama"), tiny_model("qwen3")
    sides = [
        {"name": "a", "geometry": KVGeometry.from_model(m).to_dict(), "tokenizer": None} for m in (source, target)
    ]
    layers = [{"kind": "linear", "source_layers": [i]} for i in range(4)]
    mapper = KVMapper(KVMapperConfig(source=sides[0], target=sides[1], layers=layers))
    scores = Replay(mapper, source, target).score(id_passage(ids_of(source, 30), 20))
    assert tuple(scores) == ("native", "translated", "no_context", "random_map")


def test_the_random_map_is_drawn_by_seed_and_keeps_the_mapper(gemma):
    mapper = identity_mapper(gemma)
    before = copy.deepcopy(mapper.state_dict())
    passage = id_passage(ids_of(gemma, 60), CONTEXT)
    losses = [
        Replay(mapper, gemma, gemma, seed=seed).score(passage, arms=["random_map"])["random_map"].loss
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    assert all(torch.equal(before[name], tensor) for name, tensor in mapper.state_dict().items())


def test_sinks_may_be_left_out(gemma):
    ids = ids_of(gemma, 60)
    scores = Replay(identity_mapper(gemma), gemma, gemma, sink_tokens=0).score(id_passage(ids, CONTEXT))
    assert_score(scores["translated"], gemma, ids[:CONTEXT], id_passage(ids, CONTEXT), ids[:CONTEXT])
    # Without its first token a model is not itself.
    read = [ids[0], ids[CONTEXT - 1]]
    assert_score(scores["no_context"], gemma, read, id_passage(ids, CONTEXT), ids[:CONTEXT])


@pytest.mark.parametrize("length", [2, 3, 5])
def test_contexts_shorter_than_the_sinks(gemma, length):
    passage = id_passage(ids_of(gemma, length + 8), length)
    donor = donor_of(Replay(identity_mapper(gemma), gemma, gemma), ids_of(gemma, 30, seed=1))
    scores = Replay(identity_mapper(gemma), gemma, gemma).score(passage, donor=donor)
    for arm in ("translated", "no_context", "random_map"):
        assert scores[arm].loss == pytest.approx(scores["native"].loss, abs=TOLERANCE)
    assert scores["other_document"].kl > 0.01


def test_multiple_choice_in_one_batch_is_each_ending_alone(model, replay):
    ids = ids_of(model, CONTEXT)
    endings = [ids_of(model, length, seed=length) for length in (9, 1, 14)]
    characters = [30, 4, 70]
    donor = donor_of(replay, ids_of(model, CONTEXT, seed=1))
    for label, ending in enumerate(endings[:2]):
        batch = replay.score(Passage(None, ids, ids, endings, characters, label=label), donor=donor)
        alone = replay.score(Passage(None, ids, ids, [ending], [1]), donor=donor)
        for arm in ARMS:
            assert batch[arm].positions == len(ending)
            assert batch[arm].loss == pytest.approx(alone[arm].loss, rel=0, abs=1e-5 * len(ending))
            assert batch[arm].kl == pytest.approx(alone[arm].kl, rel=0, abs=1e-5 * len(ending))
            assert batch[arm].agreement == alone[arm].agreement
            assert batch[arm].cosine == pytest.approx(alone[arm].cosine, abs=1e-5)
            assert alone[arm].chosen is None
    for arm, read in (("native", ids), ("translated", ids), ("no_context", ids[:4] + ids[-1:])):
        per_character = [
            -loss(log_probs(model, read, ending), ending) / count
            for ending, count in zip(endings, characters, strict=True)
        ]
        assert batch[arm].chosen == per_character.index(max(per_character))


def test_endings_are_chosen_by_character_not_by_token(gemma):
    ids, ending = ids_of(gemma, 20), ids_of(gemma, 6, seed=1)
    replay = Replay(identity_mapper(gemma), gemma, gemma)
    for characters, chosen in (([1, 9], 1), ([9, 1], 0)):
        scores = replay.score(Passage(None, ids, ids, [ending, ending], characters))
        assert {score.chosen for score in scores.values()} == {chosen}


def test_turns_extend_the_native_cache(model, replay, monkeypatch):
    ids = ids_of(model, 110)
    turns = [id_passage(ids[: n + 12], n, turn=turn) for turn, n in enumerate((20, 50, 95), start=1)]
    expected = [replay.score(turn) for turn in turns]
    longest = replay.read_source(turns[-1])

    read = []

    def counting(model, cache, input_ids, **arguments):
        read.append(input_ids.shape[1])
        return read_into_cache(model, cache, input_ids, **arguments)

    monkeypatch.setattr(replay_module, "read_into_cache", counting)
    monkeypatch.setattr(SourceKV, "prefill", None)  # the source does not read again
    native_cache = NativeCache()
    for turn, alone in zip(turns, expected, strict=True):
        source_kv = replay.read_source(turn, longest)
        assert len(source_kv) == len(turn.target_ids)
        scores = replay.score(turn, source_kv, native_cache=native_cache, arms=["native", "translated"])
        for arm in ("native", "translated"):
            assert scores[arm].loss == pytest.approx(alone[arm].loss, abs=TOLERANCE)
        assert_score(scores["translated"], model, turn.target_ids, turn, turn.target_ids)
    assert read == [19, 30, 45]


def test_a_turn_that_begins_otherwise_is_read_anew(gemma):
    replay = Replay(identity_mapper(gemma), gemma, gemma)
    first, other = (id_passage(ids_of(gemma, 60, seed=seed), 50) for seed in (0, 1))
    shorter = id_passage(first.target_ids, 30)
    native_cache = NativeCache()
    longest = replay.read_source(first)
    for passage in (first, other, first, shorter):
        source_kv = replay.read_source(passage, longest)
        assert source_kv.input_ids[0].tolist() == passage.source_ids
        found = replay.score(passage, source_kv, native_cache=native_cache)
        alone = replay.score(passage)
        for arm, score in alone.items():
            assert found[arm].loss == pytest.approx(score.loss, abs=TOLERANCE)


@pytest.fixture(scope="module")
def two_tokenizers(tokenizers):
    """A random mapper from Llama with one tokenizer to Gemma with another."""
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    sides = [
        {"name": name, "geometry": KVGeometry.from_model(m).to_dict(), "tokenizer": tokenizer_fingerprint(tokenizer)}
        for name, m, tokenizer in (("a", source, tokenizers["bpe"]), ("b", target, tokenizers["unigram"]))
    ]
    layers = [{"kind": "linear", "source_layers": chosen} for chosen in ([0], [3, 1], [1, 2, 3], [2])]
    mapper = KVMapper(KVMapperConfig(source=sides[0], target=sides[1], layers=layers, token_features=64)).eval()
    torch.manual_seed(2)
    for parameter in mapper.parameters():
        parameter.data.normal_(std=0.2)
    return Replay(mapper, source, target, tokenizers["bpe"], tokenizers["unigram"])


@torch.no_grad()
def test_all_arms_read_what_the_translation_holds_back(two_tokenizers, tokenizers):
    """A target whose template ends in words that the source's does not have."""
    text = "What does the delta give the farmers? It gives them silt, water and fish."
    target_ids, _ = encode_with_spans(tokenizers["unigram"], f"{text} Now you say:")
    continuation, _ = encode_with_spans(tokenizers["unigram"], "the river carries silt")
    passage = Passage(text, None, target_ids, [continuation[1:]], [22])
    target = two_tokenizers.target
    source_kv = two_tokenizers.read_source(passage)
    translation = two_tokenizers.translate(passage, source_kv)
    tail = target_ids[translation.length :]
    assert len(tail) > 4
    scores = two_tokenizers.score(passage)
    read = target_ids[:4] + tail
    assert_score(scores["no_context"], target, read, passage, target_ids)

    cache = DynamicCache(config=target.config)
    for i in range(4):
        cache.layers[i].update(*translation.layer(i, 0, translation.length, torch.device("cpu"), torch.float32))
    logits = read_into_cache(
        target, cache, torch.tensor([tail + continuation[1:-1]]), num_logits=len(continuation) - 1
    )
    expected = -logits[0].log_softmax(-1).gather(-1, torch.tensor(continuation[1:])[:, None]).sum()
    assert scores["translated"].loss == pytest.approx(expected.item(), abs=TOLERANCE)


def test_text_turns_are_cut_from_what_the_source_has_read(two_tokenizers, tokenizers, monkeypatch):
    text = "The farmers wait for the flood. What does the delta give the farmers?"
    passages = [
        Passage(part, None, encode_with_spans(tokenizers["unigram"], part)[0], [[7, 9, 12]], [3])
        for part in (text[:31], text)
    ]
    longest = two_tokenizers.read_source(passages[1])
    expected = two_tokenizers.score(passages[0])
    monkeypatch.setattr(SourceKV, "prefill", None)
    source_kv = two_tokenizers.read_source(passages[0], longest)
    assert source_kv.text == [text[:31]]
    found = two_tokenizers.score(passages[0], source_kv)
    for arm, score in expected.items():
        assert found[arm].loss == pytest.approx(score.loss, abs=TOLERANCE)


def test_an_offloaded_target(gemma):
    target = cpu_offload(copy.deepcopy(gemma), torch.device("cpu"))
    assert target.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    passage = id_passage(ids_of(gemma, 60), CONTEXT)
    expected = Replay(identity_mapper(gemma), gemma, gemma).score(passage)
    found = Replay(identity_mapper(gemma), gemma, target).score(passage)
    for arm, score in expected.items():
        assert found[arm].loss == pytest.approx(score.loss, abs=TOLERANCE)
        assert found[arm].cosine == pytest.approx(score.cosine, abs=TOLERANCE)


def test_nothing_is_left_on_the_models(gemma):
    before = copy.deepcopy(gemma.state_dict())
    Replay(identity_mapper(gemma), gemma, gemma).score(id_passage(ids_of(gemma, 30), 20))
    assert all(torch.equal(before[name], tensor) for name, tensor in gemma.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in gemma.modules())


def test_what_cannot_be_replayed(gemma, tokenizers):
    llama = tiny_model("llama")
    with pytest.raises(PairMismatchError, match="for a source of"):
        Replay(identity_mapper(gemma), llama, gemma)
    with pytest.raises(PairMismatchError, match="for a target of"):
        Replay(identity_mapper(gemma), gemma, llama)
    mapper, training = identity_mapper(gemma), copy.deepcopy(gemma).train()
    for side, models in (("source", (training, gemma)), ("target", (gemma, training))):
        with pytest.raises(ValueError, match=rf"`{side}` is in training mode.*{side}.eval\(\)"):
            Replay(mapper, *models)
    mapper = identity_mapper(gemma)
    mapper.config.source = mapper.config.source | {"tokenizer": tokenizer_fingerprint(tokenizers["bpe"])}
    with pytest.raises(TokenizerMismatchError, match="different tokenizers"):
        Replay(mapper, gemma, gemma)
    replay = Replay(identity_mapper(gemma), gemma, gemma)
    with pytest.raises(ValueError, match=r"`arms` holds \['nativ'\]"):
        replay.score(id_passage(ids_of(gemma, 30), 20), arms=["nativ"])


def test_overflowing_states_are_not_taken_for_a_figure(gemma):
    mapper = identity_mapper(gemma)
    mapper.layers[1].weight.data[0, 0] = torch.inf
    passage = id_passage(ids_of(gemma, 60), CONTEXT)
    with pytest.raises(EvaluationDataError, match="arm 'translated'.*float32 or bfloat16"):
        Replay(mapper, gemma, gemma).score(passage)


@pytest.mark.parametrize("native_layers", [0, 2])
def test_native_layers_are_the_target_s_own_in_all_arms(model, native_layers):
    """As if the source had read them for the target: of this context, or of the other one."""
    ids, donor = ids_of(model, CONTEXT + CONTINUATION), ids_of(model, 38, seed=1)
    passage, context = id_passage(ids, CONTEXT), ids[:CONTEXT]
    replay = Replay(with_native_layers(identity_mapper(model), native_layers), model, model)
    scores = replay.score(passage, donor=donor_of(replay, donor))
    assert tuple(scores) == ARMS
    for arm in ("translated", "raw_source"):
        assert_score(scores[arm], model, context, passage, context)
    assert_score(scores["other_document"], model, donor[:-1] + context[-1:], passage, context)
    # The input of the first mapped layer is right in the control, too; what its attention puts out is not.
    cosine = scores["random_map"].cosine
    assert cosine[: native_layers + 1] == pytest.approx([1] * (native_layers + 1), abs=1e-5)
    assert cosine[native_layers + 1] < 0.99


def test_raw_source_of_another_model_leaves_native_layers():
    source, target = tiny_model("llama"), tiny_model("llama", seed=1)
    mapper = with_native_layers(identity_mapper(source), 1)
    scores = Replay(mapper, source, target).score(id_passage(ids_of(source, CONTEXT + CONTINUATION), CONTEXT))
    assert scores["raw_source"].cosine[:2] == pytest.approx([1, 1], abs=1e-5)
    assert scores["raw_source"].loss == pytest.approx(scores["translated"].loss, abs=TOLERANCE)
    assert scores["raw_source"].kl > 0.1


def test_the_random_map_of_quantised_weights_and_of_identities(gemma):
    """Neither has a plain matrix to shuffle."""
    plain = identity_mapper(gemma)
    config = copy.deepcopy(plain.config)
    config.layers = [{"kind": "identity", "source_layers": [i], "rank": 0} for i in range(4)]
    passage = id_passage(ids_of(gemma, 60), CONTEXT)
    for mapper in (plain.quantize(8), plain.quantize(4), KVMapper(config).eval()):
        scores = Replay(mapper, gemma, gemma).score(passage)
        assert scores["translated"].loss == pytest.approx(scores["native"].loss, abs=1e-2)
        assert scores["random_map"].kl > 1
