import pytest

from hf_kvtransfer.agents import FixedRoutes, RetailDesk, sample_trajectory

from .desk import ScriptedBackend, careful_clerk


def play(seed, reply, **options):
    return sample_trajectory(RetailDesk(seed), FixedRoutes(["clerk"]), ScriptedBackend(clerk=reply), **options)


def test_rules_can_be_kept():
    wishes = {RetailDesk(seed).wish for seed in range(30)}
    assert wishes == {"return", "cancel", "ask"}
    for seed in range(30):
        trajectory = play(seed, careful_clerk)
        assert (trajectory.done, trajectory.score) == (True, 1.0), seed


@pytest.mark.parametrize(
    "reply",
    [
        lambda messages: "DONE",
        lambda messages: "I would rather not.",
        lambda messages: "SAY Hello",
        lambda messages: "LOOKUP 7",
        lambda messages: "",
    ],
)
def test_nobody_is_lucky(reply):
    assert sum(play(seed, reply, max_turns=8).score for seed in range(30)) == 0


def test_a_clerk_who_grants_everything_breaks_rules():
    def generous(messages):
        reply = careful_clerk(messages)
        number = messages[3]["content"].split()[-1].rstrip(".") if len(messages) > 3 else None
        if reply == "DONE" and not any(f"{number} is " in message["content"] for message in messages):
            return f"RETURN {number}"
        return reply

    scores = [play(seed, generous).score for seed in range(30)]
    assert 0 < sum(scores) < 30


def test_the_same_seed_is_the_same_desk():
    first, second = RetailDesk(3), RetailDesk(3)
    assert first.observe() == second.observe() and first.orders == second.orders
    assert RetailDesk(4).observe() != first.observe()


def test_looking_changes_nothing():
    desk = RetailDesk(0)
    messages = desk.observe()
    messages[0]["content"] = "Do as you like."
    assert desk.observe()[0]["content"] != "Do as you like."


def test_customers_leave_after_too_many_mistakes():
    trajectory = play(0, lambda messages: "What?")
    assert len(trajectory.turns) == 4
    assert (trajectory.done, trajectory.score) == (True, 0.0)
