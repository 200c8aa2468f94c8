"""The tables of a report, for a README and for a terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .arms import arm_name, effort_arms
from .statistics import MIN_DOCUMENTS, MIN_POSITIONS


if TYPE_CHECKING:
    from .report import FidelityReport


_GROUP_HEADER = [
    "native loss",
    "translated loss",
    "no context loss",
    "next token as native",
    "gap recovered",
    "gap, other document",
]
_ABSENT = "-"


@dataclasses.dataclass(frozen=True)
class Table:
    """
    A table of text.

    Args:
        title (`str`):
            What it shows.
        header (`list[str]`):
            Names of the columns. The first column names the row, the others are numbers.
        rows (`list[list[str]]`):
            Cells, as many in each row as the header has.
        note (`str`, *optional*, defaults to `""`):
            What a reader must know to read it.
        topic (`str`, *optional*, defaults to `""`):
            Which of a report's tables it is, for those who put a picture beside it.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    topic: str = ""

    def to_markdown(self) -> str:
        """A pipe table with aligned columns, under its title."""
        cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        lines = [
            "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
            for row in (cells[0], rule, *cells[1:])
        ]
        return "\n".join([f"### {self.title}", "", *lines, *(["", self.note] if self.note else [])])


def tables(report: FidelityReport) -> list[Table]:
    """
    What a report shows, in the order in which to read it.

    Args:
        report ([`FidelityReport`]):
            An evaluation.

    Returns:
        `list[Table]`: The arms; capability by capability; turn by turn, multiple choice and the probe's operating
        curve if the evaluation has them.
    """
    figures = report.figures
    found = [_arms_table(figures, report.mapper.get("native_layers")), _capabilities_table(figures["capabilities"])]
    if figures["turns"]:
        found.append(_turns_table(figures))
    if figures["choices"]:
        found.append(_choices_table(figures["choices"]))
    if report.probe and report.probe.get("curve"):
        found.append(_probe_table(report.probe))
    return found


def _arms_table(figures: dict[str, Any], native_layers: int | None) -> Table:
    rows = [
        [
            arm_name(name),
            _decimal(arm["loss"]),
            _decimal(arm["agreement"]),
            _decimal(arm["kl"]),
            _decimal(arm["cosine"]),
            f"{_decimal(arm['worst_layer']['cosine'])} (layer {arm['worst_layer']['layer']})"
            if arm["worst_layer"]
            else _ABSENT,
            _share(arm["gap_recovered"]),
        ]
        for name, arm in figures["arms"].items()
    ]
    note = (
        "Losses and KL in nats per token. Gap recovered: (no context - arm) / (no context - native) of the losses "
        "[95 % interval], left out where the context does not clearly help and on fewer than "
        f"{MIN_DOCUMENTS} documents."
    )
    if native_layers is not None:
        own = f"Layers 0 to {native_layers} are" if native_layers else "Layer 0 is"
        note += (
            f" {own} the target's own in every arm with a context, controls included (with "
            "another document those of that document): their keys and values are exact, and no map's merit."
        )
    if not figures["sufficient"]:
        note += (
            f" Only {figures['positions']:,} positions were scored, and at least {MIN_POSITIONS} are needed: this "
            "report is too small to admit anything."
        )
    header = ["the target continues on", "loss", "next token as native", "KL from native"]
    header += ["attention cosine", "worst layer", "gap recovered"]
    title = f"Arms, {figures['positions']:,} positions of {figures['documents']:,} documents"
    return Table(title, header, rows, note, "arms")


def _capabilities_table(capabilities: dict[str, Any]) -> Table:
    rows = [
        [name, f"{group['documents']:,}", f"{group['positions']:,}", *_group_cells(group["arms"])]
        for name, group in capabilities.items()
    ]
    header = ["capability", "documents", "positions", *_group_header(next(iter(capabilities.values()))["arms"])]
    return Table("Capability by capability", header, rows, topic="capabilities")


def _turns_table(figures: dict[str, Any]) -> Table:
    rows = [
        [str(group["turn"]), f"{group['documents']:,}", f"{group['positions']:,}", *_group_cells(group["arms"])]
        for group in figures["turns"]
    ]
    late = figures["late_turns"]
    rows.append(["late turns", _ABSENT, _ABSENT, *_group_cells(late["arms"])])
    header = ["turn", "dialogues", "positions", *_group_header(late["arms"])]
    return Table("Turn by turn", header, rows, f"Late turns: all turns, {late['weights']}.", "turns")


def _choices_table(choices: dict[str, Any]) -> Table:
    efforts = effort_arms(next(iter(choices.values()))["accuracy"])
    rows = [
        [
            name,
            f"{task['items']:,}",
            _decimal(task["chance"]),
            *(_decimal(task["accuracy"].get(arm)) for arm in ("native", "translated", "no_context")),
            _decimal(task["agreement"].get("translated")),
            _share(task["retention"]),
            *(_decimal(task["accuracy"][arm]) for arm in efforts),
        ]
        for name, task in choices.items()
    ]
    header = ["capability", "items", "chance", "native", "translated", "no context", "choice as native", "retention"]
    header += efforts
    note = (
        "Accuracies. Retention: (translated - chance) / (native - chance) [95 % interval], left out where native is "
        f"not clearly above chance and on fewer than {MIN_DOCUMENTS} items."
    )
    return Table("Multiple choice", header, rows, note, "choices")


def _probe_table(probe: dict[str, Any]) -> Table:
    corruptions = list(dict.fromkeys(name for point in probe["curve"] for name in point["caught"]))
    rows = [
        [
            str(point["tokens"]),
            _percent(point["false_alarm_rate"]),
            _percent(point["measured_false_alarms"]),
            *(
                f"{_percent(point['caught'].get(name))} ({_percent(point['caught_by_loss'].get(name))})"
                for name in corruptions
            ),
        ]
        for point in probe["curve"]
    ]
    header = ["tokens read", "false alarms asked", "measured", *(name.replace("_", " ") for name in corruptions)]
    note = (
        "Share of planted corruptions that the probe catches, and in brackets that the loss alone catches. In use: "
        f"{probe['tokens']} tokens at {_percent(probe['false_alarm_rate'])} false alarms, calibrated on "
        f"{probe['documents']:,} documents."
    )
    return Table("Probe", header, rows, note, "probe")


def _group_header(arms: dict[str, dict]) -> list[str]:
    return [*_GROUP_HEADER, *(f"gap, {arm}" for arm in effort_arms(arms))]


def _group_cells(arms: dict[str, dict]) -> list[str]:
    absent = {"loss": None, "agreement": None, "gap_recovered": None}
    native, translated, no_context, other = (
        arms.get(name, absent) for name in ("native", "translated", "no_context", "other_document")
    )
    return [
        _decimal(native["loss"]),
        _decimal(translated["loss"]),
        _decimal(no_context["loss"]),
        _decimal(translated["agreement"]),
        _share(translated["gap_recovered"]),
        _decimal(other["gap_recovered"] and other["gap_recovered"]["value"]),
        *(_share(arms[arm]["gap_recovered"]) for arm in effort_arms(arms)),
    ]


def _decimal(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return _ABSENT if value is None else f"{100 * value:.3g} %"


def _share(share: dict[str, float] | None) -> str:
    if share is None:
        return _ABSENT
    if share["low"] == share["high"]:
        return _decimal(share["value"])
    return f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"
