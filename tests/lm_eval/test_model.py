"""lm-eval's tasks on a translated cache: the same numbers where the mapper is exact, and natively those of `hf`."""

import runpy
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_kvtransfer import RefusedError, fit_mapper

from ..tiny_models import identity_mapper, tiny_model
from ..tiny_tokenizers import unigram


lm_eval = pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")

from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_kvtransfer.lm_eval.model import KVTransferLM  # noqa: E402


HERE = Path(__file__).parent
TEXT = (HERE / "hellaswag.jsonl").read_text(encoding="utf-8")
NUM_ITEMS = len(TEXT.splitlines())


@pytest.fixture(scope="module")
def tasks():
    return TaskManager(include_path=str(HERE), include_defaults=False)


@pytest.fixture
def evaluate(tasks, monkeypatch, tmp_path):
    """The answers to a task's items, and the results."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip, for seconds

    def run(model, task="local_hellaswag", **options):
        results = lm_eval.simple_evaluate(model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **options)
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        return [sample["resps"] for sample in samples], results

    return run


@pytest.fixture(scope="module")
def folder(llama, tokenizers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    llama.save_pretrained(folder)
    tokenizers["bpe"].save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pair(llama, tokenizers):
    """Arguments for a model whose target and source are one."""
    return {"pretrained": llama, "source": llama, "tokenizer": tokenizers["bpe"], "gate": False}


def likelihoods(answers):
    return torch.tensor([[float(value) for ((value, _),) in item] for item in answers], dtype=torch.float64)


def test_native_numbers_are_those_of_hf(evaluate, folder):
    options = {"device": "cpu", "batch_size": 2}
    expected, stock = evaluate("hf", model_args={"pretrained": folder, "dtype": "float32"}, **options)
    arguments = {"pretrained": folder, "dtype": "float32", "native": True}
    answers, results = evaluate("hf-kvtransfer", model_args=arguments, **options)
    assert answers == expected
    assert results["results"] == stock["results"]
    assert results["config"]["kvtransfer"] == {"native": True}
    assert evaluate("hf-kvtransfer", "local_perplexity", model_args=arguments, **options)[0]


def test_an_exact_translation_gives_the_same_numbers(evaluate, folder, llama, tmp_path):
    identity_mapper(llama).save_pretrained(tmp_path / "mapper")
    # As on the command line.
    arguments = f"pretrained={folder},source={folder},mapper={tmp_path / 'mapper'},gate=False,dtype=float32"
    answers, results = evaluate("hf-kvtransfer", model_args=arguments, device="cpu")
    expected, _ = evaluate("hf", model_args={"pretrained": folder, "dtype": "float32"}, device="cpu")
    torch.testing.assert_close(likelihoods(answers), likelihoods(expected), rtol=0, atol=2e-4)
    assert [[greedy for ((_, greedy),) in item] for item in answers] == [
        [greedy for ((_, greedy),) in item] for item in expected
    ]
    about = results["config"]["kvtransfer"]
    assert about["contexts"] == {"translated": NUM_ITEMS}
    assert about["mapper_digest"] == identity_mapper(llama).digest()


def test_the_command_knows_it(monkeypatch):
    """The rest is lm-eval's own command, which takes a while to list its tasks."""
    found = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: found.append(get_model("hf-kvtransfer")))
    runpy.run_module("hf_kvtransfer.lm_eval", run_name="__main__")
    assert found == [KVTransferLM]


def test_what_the_mapper_makes_of_the_context_counts(evaluate, pair, llama):
    mapper = identity_mapper(llama)
    exact, _ = evaluate(KVTransferLM(mapper=mapper, **pair))
    for i in mapper.config.mapped_layers:
        nn.init.normal_(mapper.layers[i].weight, std=0.1)
    other, _ = evaluate(KVTransferLM(mapper=mapper, **pair))
    assert (likelihoods(exact) - likelihoods(other)).abs().max() > 0.1


def test_generation_in_batches(evaluate, pair, llama):
    expected, _ = evaluate(KVTransferLM(native=True, batch_size=4, **pair), "local_continuations")
    lm = KVTransferLM(mapper=identity_mapper(llama), batch_size=4, **pair)
    answers, _ = evaluate(lm, "local_continuations")
    assert answers == expected
    assert lm.outcomes == {"translated": NUM_ITEMS}
    # The source's own states are read: without its context the answers are others.
    blank = identity_mapper(llama)
    for i in blank.config.mapped_layers:
        nn.init.zeros_(blank.layers[i].weight)
    assert evaluate(KVTransferLM(mapper=blank, batch_size=4, **pair), "local_continuations")[0] != expected


def test_two_tokenizers(evaluate, llama, tokenizers):
    target, other = tiny_model("gemma3", seed=1), unigram(TEXT)
    other.eos_token = "<bos>"  # lm-eval stops there
    both = {"source_tokenizer": tokenizers["bpe"], "target_tokenizer": other}
    mapper = fit_mapper(llama, target, TEXT.splitlines() * 2, **both, num_source_layers=1)
    lm = KVTransferLM(
        target, mapper=mapper, source=llama, source_tokenizer=tokenizers["bpe"], tokenizer=other, gate=False
    )
    answers, _ = evaluate(lm)
    assert likelihoods(answers).isfinite().all()
    assert evaluate(lm, "local_continuations")[0]
    assert lm.outcomes == {"translated": 2 * NUM_ITEMS}


def test_contexts_that_are_too_long_or_too_short(pair, llama):
    lm = KVTransferLM(mapper=identity_mapper(llama), max_length=24, **pair)
    native = KVTransferLM(native=True, max_length=24, **pair)
    requests = [(("", ""), list(range(3, 43)), [50, 51, 52]), (("", ""), [7], [50]), (("", ""), [7], [51, 52])]
    answers, expected = (model._loglikelihood_tokens(requests, disable_tqdm=True) for model in (lm, native))
    torch.testing.assert_close(*(torch.tensor([total for total, _ in some]) for some in (answers, expected)))
    assert lm.outcomes == {"translated": 1, "too short": 1}
    with pytest.raises(ValueError, match="A continuation has 40 tokens"):
        lm._loglikelihood_tokens([(("", ""), [7], list(range(3, 43)))], disable_tqdm=True)


def test_what_is_refused(evaluate, pair, llama):
    with pytest.raises(ValueError, match="name the model that reads"):
        KVTransferLM(llama, tokenizer=pair["tokenizer"])
    with pytest.raises(RefusedError, match="(?s)no evidence.*`gate=False`"):
        KVTransferLM(mapper=identity_mapper(llama), **pair | {"gate": True})
    with pytest.raises(ValueError, match="mixed_precision_dtype"):
        KVTransferLM(mapper=identity_mapper(llama), mixed_precision_dtype="bfloat16", **pair)
    with pytest.raises(NotImplementedError, match="no context"):
        evaluate(KVTransferLM(mapper=identity_mapper(llama), **pair), "local_perplexity")


def test_lm_eval_finds_it():
    found = entry_points(group="lm_eval.models", name="hf-kvtransfer")
    assert all(entry.load() is KVTransferLM for entry in found)
