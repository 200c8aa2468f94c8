"""Results and reports as an evaluation gives them, from a random generator instead of models."""

import random

from hf_kvtransfer.fidelity.report import FidelityReport
from hf_kvtransfer.fidelity.results import ArmScore, PassageResult


# Nats per token that each arm loses on top of the native one.
EXCESS = {"native": 0.0, "translated": 0.2, "other_document": 1.3, "no_context": 1.0, "random_map": 2.0}
WITH_EFFORTS = EXCESS | {"effort 0.05": 0.15, "effort 0.5": 0.05}
CAPABILITIES = ("code", "dialogue", "knowledge")

PROBE = {
    "tokens": 32,
    "false_alarm_rate": 0.05,
    "documents": 150,
    "bands": {"32": {"losses": [1.5, 2.25]}},
    "curve": [
        {
            "tokens": tokens,
            "false_alarm_rate": 0.05,
            "measured_false_alarms": 0.047,
            "caught": {"other_document": 0.93, "shuffled_tokens": 1.0},
            "caught_by_loss": {"other_document": 0.8, "shuffled_tokens": 0.4},
        }
        for tokens in (8, 32)
    ],
}


def passage(document="a", capability="text", turn=None, choices=None, label=None, positions=64, **losses):
    """A row with the given losses per token by arm; `chosen` of each arm is the label."""
    arms = {
        arm: ArmScore(
            positions,
            loss * positions,
            positions if arm == "native" else positions // 2,
            0.0 if arm == "native" else 0.1 * positions,
            [] if arm == "native" else [0.9, 0.8],
            label,
        )
        for arm, loss in losses.items()
    }
    return PassageResult(document, capability, turn, choices, label, arms)


def evaluation(num_documents=24, num_turns=3, num_layers=4, seed=0, excess=EXCESS) -> list[PassageResult]:
    """Dialogues, documents without turns and multiple-choice items in turn."""
    generator = random.Random(seed)
    rows = []
    for number in range(num_documents):
        capability = CAPABILITIES[number % 3]
        choices = generator.choice((2, 4)) if capability == "knowledge" else None
        label = choices and generator.randrange(choices)
        for turn in range(1, num_turns + 1) if capability == "dialogue" else (None,):
            positions = generator.randrange(10, 80)
            hard = generator.gauss(2.5, 0.5)
            arms = {}
            for arm, more in excess.items():
                native = arm == "native"
                right = choices and generator.random() < (0.9 if native else 0.6)
                arms[arm] = ArmScore(
                    positions=positions,
                    loss=positions * max(0.1, hard + more * generator.uniform(0.5, 1.5)),
                    agreement=positions if native else generator.randrange(positions),
                    kl=0.0 if native else positions * more * generator.random(),
                    cosine=[] if native else [generator.uniform(0.5, 1) for _ in range(num_layers)],
                    chosen=choices and (label if right else generator.randrange(choices)),
                )
            rows.append(PassageResult(f"document {number}", capability, turn, choices, label, arms))
    return rows


def make_report(results=None, **changes) -> FidelityReport:
    policy = {"kind": "DynamicCache", "full_layers": 3, "quantized": False}
    entries = {
        "mapper": {"name": "org/small--large", "digest": "12ab"},
        "source": {"identity": {"name": "org/small"}, "cache_policy": policy},
        "target": {"identity": {"name": "org/large"}, "cache_policy": policy},
        "data": [{"name": "talk.jsonl", "sha256": "34cd", "documents": 24}],
        "settings": {"context_tokens": 256, "tail_tokens": 1},
        "versions": {"torch": "2.13.0"},
        "results": evaluation() if results is None else results,
        "probe": PROBE,
    }
    return FidelityReport(**entries | changes)
