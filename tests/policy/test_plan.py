import pytest

from hf_kvtransfer import TransferPolicy
from hf_kvtransfer.fidelity.gate import Verdict
from hf_kvtransfer.policy import Traffic, TransferPlan

from .test_policy import COSTS


ADMITTED, REFUSED = (Verdict(admitted, ("too new",), True, "me/pair") for admitted in (True, False))


def make(traffic=((50, 100), (4000, 10)), **changes):
    options = {"days": 30, "fit_seconds": 600.0, "validation_seconds": 300.0, "verdict": ADMITTED} | changes
    return TransferPlan.make(TransferPolicy(COSTS), [Traffic(*kind) for kind in traffic], **options)


def test_adaptation_is_shared_by_what_is_worth_a_handoff():
    plan = make()
    assert plan.handoffs == 300  # short contexts are faster to read
    prefill, handoff = COSTS.prefill.seconds(4000), COSTS.handoff.seconds(4000)
    assert plan.saved_seconds == pytest.approx(300 * (prefill - handoff))
    assert plan.days_until_paid == pytest.approx(900 / (10 * (prefill - handoff)))
    assert plan.pays
    (short, long) = plan.table().rows
    assert short[0] == "50" and short[-1] == "re-prefill" and short[5] == "-"
    assert long[0] == "4,000" and long[-1] == "transfer"
    assert long[2] == "3.4 min"  # 10 prefills of 20.1 s
    assert (long[5], long[6]) == ("2.0 s", "1.0 s")
    assert plan.summary().startswith("Transfer: the mapper takes 15.0 min and saves as much in 4.8 days")


def test_with_an_effort_a_handoff_takes_longer():
    plain, again = make(), make(effort=0.3)
    assert [decision.effort for decision in again.decisions] == [0.3, 0.3]
    assert again.saved_seconds < plain.saved_seconds


def test_mapper_that_does_not_pay_in_its_lifetime():
    plan = make(days=3)
    assert not plan.pays
    assert [row[-1] for row in plan.table().rows] == ["re-prefill"] * 2
    assert "is used for 3" in plan.summary()


def test_nothing_to_save():
    plan = make(traffic=[(50, 100)])
    assert plan.days_until_paid is None and not plan.pays
    assert "saves nothing" in plan.summary()


def test_refused_mapper():
    plan = make(verdict=REFUSED)
    assert not plan.pays
    assert [row[-1] for row in plan.table().rows] == ["re-prefill"] * 2
    assert "the gate refuses me/pair" in plan.summary() and "too new" in plan.summary()


@pytest.mark.parametrize(
    "changes", [{"traffic": []}, {"days": 0}, {"fit_seconds": -1.0}, {"validation_seconds": float("nan")}]
)
def test_impossible_plans(changes):
    with pytest.raises(ValueError):
        make(**changes)


@pytest.mark.parametrize("kind", [(0, 1), (10, 0), (10, float("inf"))])
def test_impossible_traffic(kind):
    with pytest.raises(ValueError, match="must be positive"):
        Traffic(*kind)
