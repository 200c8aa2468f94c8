import dataclasses

import pytest

from hf_kvtransfer import MeasuredCosts, TransferPolicy
from hf_kvtransfer.policy import TimeModel, policy


# No device: nothing of the machine at hand goes into the numbers.
COSTS = MeasuredCosts(
    prefill=TimeModel(0.1, 3e-3, 5e-7),
    handoff=TimeModel(0.6, 2e-4),
    source_prefill=TimeModel(0.1, 1e-3, 2e-7),
    measured=[],
    reference_seconds=1e-3,
    device=None,
    cache_bytes_per_token=1000,
    largest_layer_bytes_per_token=100,
    first_layers=0.05,
)
ON_CPU = dataclasses.replace(COSTS, device="cpu")


@pytest.fixture
def steady(monkeypatch):
    """A machine as fast as when it was measured, with room."""
    state = {"slowdown": 1.0, "free": 10**12}
    monkeypatch.setattr(policy.LoadMeter, "slowdown", lambda self: state["slowdown"])
    monkeypatch.setattr(policy, "free_memory", lambda device: state["free"])
    return state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"refusal_rate": 0.05},
        {"error_rate": 0.1, "wrong_answer_seconds": 20.0},
        {"error_rate": 0.1, "wrong_answer_seconds": 20.0, "concurrency": 4, "refusal_rate": 0.05},
    ],
)
@pytest.mark.parametrize(("batch_size", "effort"), [(1, 0.0), (3, 0.0), (1, 0.2)])
def test_break_even_is_where_the_choice_turns(options, batch_size, effort):
    chooser = TransferPolicy(COSTS, **options)
    break_even = chooser.decide(100, batch_size, effort).break_even_tokens
    assert break_even > 1
    before, there = (chooser.decide(n, batch_size, effort) for n in (break_even - 1, break_even))
    assert (before.choice, there.choice) == ("recompute", "transfer")
    assert before.saved_seconds <= 0 < there.saved_seconds
    assert all(chooser.decide(n, batch_size, effort).choice == "transfer" for n in (2 * break_even, 100_000))


def test_estimates_are_those_of_the_costs():
    decision = TransferPolicy(COSTS, refusal_rate=0.1, error_rate=0.2, wrong_answer_seconds=3.0).decide(1000, 2)
    assert decision.prefill_seconds == pytest.approx(0.1 + 2 * (3 + 0.5))
    assert decision.handoff_seconds == pytest.approx(0.6 + 2 * 0.2 + 0.1 * decision.prefill_seconds)
    assert decision.wrong_answer_seconds == pytest.approx(2 * 0.2 * 3)
    assert f"worth it from {decision.break_even_tokens:,} tokens on" in str(decision)


def test_what_is_read_again_counts():
    chooser = TransferPolicy(COSTS)
    decision = chooser.decide(1000, 2, effort=0.15)
    # A fifth of the prefill's tokens, with those of the first layers, and the weights once more; and of what is read
    # again attention computes all pairs.
    seconds = 0.6 + 2 * 0.2 + 0.1 + 2 * (0.2 * 3 + 0.35 * 0.5)
    assert decision.handoff_seconds == pytest.approx(seconds)
    # A question is read on top of the context, of a long one the end.
    seconds += 0.1 + 2 * (0.03 + 5e-7 * 10**2 + 2 * 5e-7 * 10 * 1000)
    assert chooser.decide(1000, 2, 0.15, 10).handoff_seconds == pytest.approx(seconds)
    assert chooser.decide(1000, 2, 0.15, 10**6).handoff_seconds < seconds + 0.5
    assert chooser.decide(1000, 2, 0.0, 10) == chooser.decide(1000, 2)
    assert decision.effort == 0.15 and decision.prefill_seconds == chooser.decide(1000, 2).prefill_seconds
    needed = [chooser.decide(1000, effort=effort).break_even_tokens for effort in (0.0, 0.15, 0.4)]
    assert needed == sorted(set(needed))
    # With all of it a handoff is a prefill, and whatever was translated before.
    for effort in (0.95, 1.0):
        decision = chooser.decide(10**6, effort=effort)
        assert (decision.choice, decision.break_even_tokens) == ("recompute", None)
    with pytest.raises(ValueError, match="`effort` must be between 0"):
        chooser.decide(1000, effort=1.1)


def test_wrong_answers_cost_and_waiting_requests_gain():
    careless, careful = TransferPolicy(COSTS), TransferPolicy(COSTS, error_rate=0.1, wrong_answer_seconds=100.0)
    assert careless.decide(1000).choice == "transfer"
    assert careful.decide(1000).choice == "recompute"
    careful.concurrency = 8
    assert careful.decide(1000).choice == "transfer"


def test_handoff_that_is_never_faster():
    slow = dataclasses.replace(COSTS, prefill=TimeModel(0.1, 1e-4))
    decision = TransferPolicy(slow).decide(10**6)
    assert (decision.choice, decision.break_even_tokens) == ("recompute", None)


def test_handoff_that_is_always_faster():
    decision = TransferPolicy(dataclasses.replace(COSTS, handoff=TimeModel(0.0, 0.0))).decide(1)
    assert (decision.choice, decision.break_even_tokens) == ("transfer", 1)


def test_busy_machine(steady):
    chooser = TransferPolicy(ON_CPU, error_rate=0.1, wrong_answer_seconds=20.0)
    quiet = chooser.decide(1000)
    steady["slowdown"] = 3.0
    busy = chooser.decide(1000)
    assert busy.prefill_seconds == pytest.approx(3 * quiet.prefill_seconds)
    # Seconds weigh more against the same wrong answers.
    assert busy.break_even_tokens < quiet.break_even_tokens


def test_no_room_for_a_handoff(steady):
    chooser = TransferPolicy(ON_CPU, concurrency=3)
    steady["free"] = 3 * 1000 * 1200
    assert chooser.decide(1000).choice == "transfer"
    steady["free"] -= 1
    decision = chooser.decide(1000)
    assert decision.choice == "recompute"
    assert "needs 4 MB" in decision.reason
    steady["free"] = None  # a device that does not tell
    assert chooser.decide(1000).choice == "transfer"


def test_machine_at_hand():
    decision = TransferPolicy(dataclasses.replace(ON_CPU, reference_seconds=1e-9)).decide(1000)
    assert decision.slowdown > 10
    assert decision.prefill_seconds > 10 * COSTS.prefill.seconds(1000)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"error_rate": 1.5}, "error_rate"),
        ({"error_rate": {0.2: 0.1}}, "without an effort"),
        ({"refusal_rate": float("nan")}, "refusal_rate"),
    ]
    + [({"wrong_answer_seconds": -1.0}, "wrong_answer_seconds")],
)
def test_impossible_numbers(options, named):
    with pytest.raises(ValueError, match=named):
        TransferPolicy(COSTS, **options)


@pytest.mark.parametrize(("tokens", "batch_size", "concurrency"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_impossible_requests(tokens, batch_size, concurrency):
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        TransferPolicy(COSTS, concurrency=concurrency).decide(tokens, batch_size)


def test_an_effort_counts_as_the_largest_known_one_below():
    chooser = TransferPolicy(COSTS, error_rate={0: 0.3, 0.2: 0.1}, wrong_answer_seconds=10.0)
    wrong = [chooser.decide(1000, effort=effort).wrong_answer_seconds for effort in (0, 0.1, 0.2, 0.9, 1)]
    assert wrong == pytest.approx([3.0, 3.0, 1.0, 1.0, 0.0])
