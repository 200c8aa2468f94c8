"""A report as one page that explains itself to somebody who did not run it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..fitting.plot import plot_selection
from ..layer_table import layer_table
from ..mapper import KVMapper
from ..plotting import inline_svg, printable
from . import plots
from .arms import arm_name
from .effort_advice import effort_advice
from .gate import FidelityGate
from .report import FidelityReport
from .statistics import layer_cosines
from .tables import Table, tables


TEMPLATE = Path(__file__).with_name("report.html.j2")

# For each topic of a table: how it is drawn, and what the picture and the table say.
_PICTURES: dict[str, tuple[Callable[[FidelityReport], Any], str]] = {
    "arms": (
        plots.plot_arms,
        "The same continuations, scored after different beginnings. The translated cache is worth something if it is "
        "close to the target's own prefill, and far from the controls: a translation of another document, no context, "
        "a map of random numbers.",
    ),
    "capabilities": (
        plots.plot_capabilities,
        "A mean over all text hides what a mapper is bad at. Blue is the translated cache with its 95 % interval; "
        "orange is a translation of another document of the same kind, which should recover little.",
    ),
    "turns": (
        plots.plot_turns,
        "Dialogues, replayed as they would be served: at each turn the source has read the turns before. Errors that "
        "build up show as a growing distance from the target's own prefill.",
    ),
    "layers": (
        plots.plot_layers,
        "Where in the target the translation is least exact: the cosine between what each layer's attention gives on "
        "this cache, and what it gives on the target's own.",
    ),
    "choices": (
        plots.plot_choices,
        "Questions with several endings, one of them right. The target chooses the one with the highest probability "
        "per character.",
    ),
    "probe": (
        plots.plot_probe,
        "Before a translated cache is used, the target reads the last tokens of the context itself, and the "
        "translation is dropped if what it finds there is not as it should be. Each line is one way in which caches "
        "were damaged on purpose.",
    ),
}


@dataclasses.dataclass(frozen=True)
class _Section:
    table: Table
    explanation: str
    picture: Markup | None


def report_html(report: FidelityReport, mapper: KVMapper | None = None, gate: FidelityGate | None = None) -> str:
    """
    Make one self-contained page of a report: no script, nothing that is fetched, pictures and tables within it.

    Args:
        report ([`FidelityReport`]):
            An evaluation. What it says is shown as text, whoever wrote it.
        mapper ([`KVMapper`], *optional*):
            Whose evidence it is. The page then shows what it reads and takes, too, and whether the evidence is about
            its weights.
        gate ([`FidelityGate`], *optional*):
            Whose verdict is shown, by default the default one.

    Returns:
        `str`: HTML. Write it with `encoding="utf-8"`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    gate = FidelityGate() if gate is None else gate
    if mapper is None:
        verdict = gate.verdict(report.mapper["name"], gate.judge(report))
    else:
        verdict = gate.admit(mapper, None, None)
    environment = jinja2.Environment(
        autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        source=report.source["identity"].get("name"),
        target=report.target["identity"].get("name"),
        key_figures=_key_figures(report.figures),
        gate=gate,
        reasons=verdict.reasons,
        advice=effort_advice(gate, verdict, report),
        sections=list(_sections(report)),
        mapper_section=None if mapper is None else _mapper_section(mapper),
    )


def _sections(report: FidelityReport) -> Iterator[_Section]:
    for table in [*tables(report), _layers_table(report)]:
        draw, explanation = _PICTURES[table.topic]
        picture = inline_svg(lambda draw=draw: draw(report), table.topic, f"{table.title}. {explanation}")  # type: ignore[misc]
        yield _Section(table, explanation, Markup(picture))


def _layers_table(report: FidelityReport) -> Table:
    arms = [arm for arm in report.figures["arms"] if arm != "native"]
    cosines = [layer_cosines(report.results, arm) for arm in arms]
    rows = [[str(i), *(f"{value:.3f}" for value in values)] for i, values in enumerate(zip(*cosines, strict=True))]
    return Table("Layer by layer", ["layer", *(arm_name(arm) for arm in arms)], rows, topic="layers")


def _mapper_section(mapper: KVMapper) -> _Section:
    explanation = (
        f"The mapper takes {mapper.num_bytes() / 1e6:.1f} MB. For each layer of the target it reads some layers of "
        "the source, and makes that layer's keys and values of them; its cost grows with what is read."
    )
    try:
        picture = Markup(inline_svg(lambda: plot_selection(mapper.config), "mapper", explanation))
    except ValueError:  # a mapper that does not say what its layers are worth
        picture = None
    return _Section(layer_table(mapper), explanation, picture)


def _key_figures(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What to look at first: a number, its name, and what belongs to it."""
    translated = figures["arms"]["translated"]
    found = [_share(translated["gap_recovered"], "of the gap recovered, all text")]
    gaps = {
        name: gap
        for name, group in figures["capabilities"].items()
        if (gap := group["arms"]["translated"]["gap_recovered"]) is not None
    }
    if len(gaps) > 1:
        worst = min(gaps, key=lambda name: gaps[name]["value"])
        found.append(_share(gaps[worst], f"of the gap recovered in the worst capability, {worst}"))
    if figures["late_turns"]:
        gap = figures["late_turns"]["arms"]["translated"]["gap_recovered"]
        found.append(_share(gap, "of the gap recovered in dialogues, late turns weighted most"))
    found.append((f"{translated['agreement']:.0%}", "of next tokens as after the target's own prefill", ""))
    extent = f"tokens scored, in {figures['documents']:,} documents"
    return [
        *found,
        (f"{figures['positions']:,}", extent, "" if figures["sufficient"] else "too few to admit anything"),
    ]


def _share(share: dict[str, float] | None, name: str) -> tuple[str, str, str]:
    if share is None:
        return "-", name, "not to be told from what was measured"
    return f"{share['value']:.2f}", name, f"{share['low']:.2f} to {share['high']:.2f} with 95 % confidence"


def _shown(value: Any) -> Any:
    """What stands in the page for a value of the template."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
