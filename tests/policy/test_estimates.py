import copy

import pytest
import torch

from hf_kvtransfer import fit_mapper
from hf_kvtransfer.policy.estimates import fit_seconds, unfitted_mapper, validation_seconds

from ..fidelity.evidence import make_report, passage
from ..tiny_models import identity_mapper, random_ids, tiny_model
from .test_policy import COSTS


def test_a_fit_reads_its_text_with_both_models(llama):
    mapper = identity_mapper(llama)
    mapper.config.fit = {"train_tokens": 9_000, "held_out_tokens": 1_000, "num_texts": 20}
    passes = 20 * (COSTS.prefill.seconds(500) + COSTS.source_prefill.seconds(500))
    assert passes < fit_seconds(COSTS, mapper) < 2 * passes
    mapper.config.fit = None
    assert fit_seconds(COSTS, mapper) == fit_seconds(COSTS) > 10 * passes


def test_an_evaluation_reads_each_document_and_hands_it_over(llama):
    mapper = identity_mapper(llama)
    rows = [passage(str(i), native=1.0, translated=1.5, no_context=3.0) for i in range(8)]
    mapper.evidence = make_report(rows, settings={"context_tokens": 400, "continuation_tokens": 100}, probe=None)
    each = COSTS.prefill.seconds(500) + COSTS.source_prefill.seconds(500) + 4 * COSTS.handoff.seconds(500)
    assert validation_seconds(COSTS, mapper) == pytest.approx(8 * each)
    settings = mapper.evidence.settings | {"efforts": [0.15, 0.3]}
    mapper.evidence = make_report(rows, settings=settings, probe=None)
    more = sum(COSTS.handoff_with(effort).seconds(500) for effort in (0.15, 0.3))
    assert validation_seconds(COSTS, mapper) == pytest.approx(8 * (each + more))
    assert validation_seconds(COSTS) > validation_seconds(COSTS, mapper)  # of 150 documents


def test_unfitted_mapper_is_as_large_as_a_fitted_one(llama, gemma):
    source, target = tiny_model("llama", num_hidden_layers=8), gemma
    guess = unfitted_mapper(source, target)
    fitted = fit_mapper(source, target, list(random_ids(source, 40, 60)))
    assert guess.num_bytes() == pytest.approx(2 * fitted.num_bytes(), rel=0.02)  # float32, and bfloat16
    for specs in (guess.config.layers, fitted.config.layers):
        assert [spec["kind"] for spec in specs] == ["native", "linear", "linear", "linear"]
        assert all(len(spec["source_layers"]) == 4 for spec in specs[1:])
    assert guess.config.token_features == fitted.config.token_features
    chosen = [spec["source_layers"] for spec in guess.config.layers[1:]]
    assert chosen == sorted(chosen) and chosen[0][0] < chosen[-1][0]  # at proportional depth
    assert unfitted_mapper(copy.deepcopy(source).to(torch.bfloat16), target).dtype == target.dtype
