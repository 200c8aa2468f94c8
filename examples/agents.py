"""
Two agents read each other's reports: SmolLM2-135M-Instruct and Gemma-3-270M report in turn on one story. Gemma takes
over SmolLM2's cache, translated, and each goes on from its own cache when its turn comes again. The same natively.

    python examples/agents.py
"""

from pathlib import Path

from transformers import set_seed

from hf_kvtransfer import FidelityGate
from hf_kvtransfer.agents import FixedRoutes, TransformersBackend, compare
from hf_kvtransfer.demo_models import load_demo_model


HERE = Path(__file__).parent
MAPPER = HERE.parent / "mappers" / "smollm2-135m-instruct--gemma-3-270m"
# What reading a story asks of the mapper, see quickstart.py.
GATE = FidelityGate(capabilities=("everyday text", "knowledge", "reasoning"))
TASKS = (
    "Report in one sentence what has happened.",
    "Read the report above, and add in one sentence what it leaves out.",
    "Read both reports above, and say in one sentence what may happen next.",
)


class Reports:
    """An environment: a story, and a task for each turn that asks about it and about the reports so far."""

    def __init__(self, story):
        self.story, self.reports = story, []

    @property
    def done(self):
        return len(self.reports) == len(TASKS)

    @property
    def score(self):
        return float(self.done)  # nobody marks them

    def observe(self):
        messages = [{"role": "user", "content": f"{self.story}\n\n{TASKS[0]}"}]
        for report, task in zip(self.reports, TASKS[1:], strict=False):
            messages += [{"role": "assistant", "content": report}, {"role": "user", "content": task}]
        return messages[: 2 * len(self.reports) + 1]

    def act(self, text):
        self.reports.append(text)


def main():
    set_seed(0)
    story = (HERE / "harbour.txt").read_text(encoding="utf-8")
    models = {"SmolLM2": load_demo_model("smollm2-135m-instruct"), "Gemma": load_demo_model("gemma-3-270m")}
    options = {"max_new_tokens": 48, "do_sample": False}
    native = TransformersBackend(models, **options)
    translated = TransformersBackend(models, {("SmolLM2", "Gemma"): MAPPER}, conversation={"gate": GATE}, **options)
    router = FixedRoutes(["SmolLM2", "Gemma"], cycle=True)
    comparison = compare([lambda: Reports(story)], router, native, translated)
    outcome = comparison.outcomes[0]
    for name, trajectory in (("translated", outcome.translated), ("native", outcome.native)):
        print(f"\n{name}")
        for turn in trajectory.turns:
            cache = turn.cache
            print(
                f"{turn.model}: {len(turn.input_ids)} tokens, {cache.held_tokens} in its cache, "
                f"{sum(cache.translated_tokens.values())} translated, {cache.read_tokens} read; {turn.seconds:.2f} s"
            )
            for reason in cache.reasons:
                print(f"    because {reason}")
            print(f"    {turn.text!r}")
    print(f"\n{comparison}")


if __name__ == "__main__":
    main()
