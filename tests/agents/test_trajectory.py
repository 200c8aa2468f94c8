import json

import pytest

from hf_kvtransfer import UnknownModelError
from hf_kvtransfer.agents import FixedRoutes, Trajectory, compare, sample_trajectory

from .desk import ScriptedBackend, SmallTalk


def backend():
    return ScriptedBackend(a=lambda messages: f"a{len(messages)}", b=lambda messages: f"b{len(messages)}")


def test_records_turns_routes_and_tokens():
    trajectory = sample_trajectory(SmallTalk(word="a"), FixedRoutes(["a", "b"], cycle=True), backend())
    assert trajectory.routes == ["a", "b", "a"]
    assert [turn.text for turn in trajectory.turns] == ["a1", "b3", "a5"]
    assert (trajectory.done, trajectory.score) == (True, pytest.approx(2 / 3))
    first, second, third = trajectory.turns
    assert first.input_ids == list(map(ord, "The farmers wait."))
    assert second.observed == [
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "And the flood?"},
    ]
    assert third.output_ids == list(map(ord, "a5"))
    assert second.cache.held_tokens == 0
    assert third.cache.held_tokens == len(first.input_ids) + 2
    assert trajectory.read_tokens == sum(len(turn.input_ids) for turn in trajectory.turns) - third.cache.held_tokens


def test_max_turns():
    trajectory = sample_trajectory(SmallTalk(), FixedRoutes(["a"]), backend(), max_turns=2)
    assert len(trajectory.turns) == 2
    assert not trajectory.done


def test_router_that_names_an_unknown_model():
    environment, played = SmallTalk(), backend()
    trajectory = Trajectory()
    with pytest.raises(UnknownModelError, match="'c' for turn 2, the backend has a, b. Nothing was done"):
        sample_trajectory(environment, FixedRoutes(["a", "c"]), played, trajectory=trajectory)
    assert trajectory.routes == ["a"] and environment.replies == ["a1"]
    # The next call answers.
    sample_trajectory(environment, FixedRoutes(["a", "b"]), played, trajectory=trajectory)
    assert [turn.text for turn in trajectory.turns] == ["a1", "b3", "b5"]
    assert played.resets == 0  # what the caches held was kept


def test_failing_model_can_be_asked_again():
    environment, calls = SmallTalk(), []

    def moody(messages):
        calls.append(len(messages))
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return "fine"

    trajectory, played = Trajectory(), ScriptedBackend(a=moody)
    with pytest.raises(RuntimeError, match="out of memory"):
        sample_trajectory(environment, FixedRoutes(["a"]), played, trajectory=trajectory)
    sample_trajectory(environment, FixedRoutes(["a"]), played, trajectory=trajectory)
    assert calls == [1, 3, 3, 5]
    assert environment.replies == ["fine"] * 3
    assert [len(turn.observed) for turn in trajectory.turns] == [1, 2, 2]


def test_save_and_load(tmp_path):
    trajectory = sample_trajectory(SmallTalk(), FixedRoutes(["a", "b"]), backend())
    trajectory.save(tmp_path / "trajectory.json")
    assert Trajectory.load(tmp_path / "trajectory.json") == trajectory
    (tmp_path / "other.json").write_text(json.dumps({"turns": [{"model": "a"}]}))
    with pytest.raises(ValueError, match="does not hold a trajectory"):
        Trajectory.load(tmp_path / "other.json")


@pytest.mark.parametrize("routes", [[], "ab"])
def test_no_routes(routes):
    with pytest.raises(ValueError, match="name a model for each turn"):
        FixedRoutes(routes)


class Impatient:
    """Routes by what was said, and not by number."""

    def route(self, messages, turn):
        return "b" if "a1" in [message["content"] for message in messages] else "a"


def test_compare_replays_the_routes():
    def translated_b(messages):
        return "silt" if len(messages) < 5 else "sand"

    translated = ScriptedBackend(a=lambda messages: "a1", b=translated_b)
    native = ScriptedBackend(a=lambda messages: "a1", b=lambda messages: "silt")
    comparison = compare([lambda: SmallTalk(word="silt")] * 8, Impatient(), native, translated)
    outcome = comparison.outcomes[0]
    assert outcome.native.routes == outcome.translated.routes == ["a", "b", "b"]
    assert (outcome.same_turns, outcome.is_same) == (2, False)
    assert comparison.native_score == pytest.approx(2 / 3)
    assert comparison.translated_score == pytest.approx(1 / 3)
    assert comparison.score_difference() == (pytest.approx(-1 / 3),) * 3  # the same in each task
    assert "8 tasks: score 0.333 translated, 0.667 native, difference -0.333" in str(comparison)


def test_compare_needs_tasks():
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([], FixedRoutes(["a"]), backend(), backend())
    with pytest.raises(ValueError, match="over before its first turn"):
        compare([lambda: SmallTalk(said=())], FixedRoutes(["a"]), backend(), backend())
