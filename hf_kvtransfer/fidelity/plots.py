"""The figures of a report, as pictures."""

import itertools
from collections.abc import Iterable
from typing import Any

from ..plotting import new_figure, printable
from .arms import arm_name, effort_arms
from .report import FidelityReport
from .statistics import layer_cosines


_COLOURS = {
    "native": "#222222",
    "translated": "#0b62a4",
    "other_document": "#d9822b",
    "no_context": "#888888",
    "raw_source": "#7a4fa3",
    "random_map": "#b33a3a",
}
# Of efforts, the least first.
_EFFORT_COLOURS = ("#2e9e8f", "#5fb56a", "#a3b83c", "#c9a227")
# What goes further beyond the loss without any context, as a share of it, runs off a plot of losses.
_HEADROOM = 0.3
# More rows are for the table alone.
_MOST_ROWS = 40
_LONGEST_NAME = 40
# Characters that fit on one line.
_LONGEST_LEGEND = 90


def plot_arms(report: FidelityReport) -> Any:
    """Loss of each arm. Arms that are far worse than no context run off the axis, with their number beside them."""
    arms = report.figures["arms"]
    losses = {arm_name(name): arm["loss"] for name, arm in arms.items()}
    end = arms.get("no_context", arms["translated"])["loss"] * (1 + _HEADROOM) or 1.0
    figure, colours = new_figure(7, 0.6 + 0.32 * len(arms)), _colours(arms)
    axes = figure.subplots()
    bars = axes.barh(list(losses), list(losses.values()), color=[colours[name] for name in arms], height=0.6)
    for bar, loss in zip(bars, losses.values(), strict=True):
        axes.text(min(loss, end), bar.get_y() + 0.3, f" {loss:.2f}{' →' if loss > end else ''}", va="center")
    axes.set(xlabel="loss, nats per token (lower is better)", xlim=(0, end))
    axes.invert_yaxis()
    return figure


def plot_capabilities(report: FidelityReport) -> Any:
    """Share of the gap that is recovered in each capability, with its interval, and by another document's cache."""
    groups = dict(list(report.figures["capabilities"].items())[:_MOST_ROWS])
    colours, efforts = _colours(report.figures["arms"]), effort_arms(report.figures["arms"])
    figure = new_figure(7, 1.1 + (0.32 + 0.12 * len(efforts)) * len(groups))
    axes = figure.subplots()
    # Each effort on a line of its own, below that of the translated cache.
    arms = [("translated", "o", 0.0), ("other_document", "D", 0.0)]
    arms += [(arm, "o", 0.7 * number / (len(efforts) + 1)) for number, arm in enumerate(efforts, start=1)]
    for place, group in enumerate(groups.values()):
        for arm, marker, below in arms:
            share = group["arms"].get(arm, {}).get("gap_recovered")
            if share is not None:
                axes.plot([share["low"], share["high"]], [place + below] * 2, color=colours[arm], linewidth=1.5)
                axes.plot(share["value"], place + below, marker, color=colours[arm], label=arm_name(arm))
    axes.set_yticks(range(len(groups)), [_short(name) for name in groups])
    axes.set(xlabel="gap recovered (0: as without the context, 1: as after reading it), 95 % intervals")
    axes.set_ylim(len(groups) - (0.25 if efforts else 0.5), -0.5)
    _between_none_and_all(axes.axvline)
    _legend_once(axes)
    return figure


def plot_turns(report: FidelityReport) -> Any:
    """Loss of each arm, and the share of the gap that is recovered, turn by turn."""
    turns, efforts = report.figures["turns"], effort_arms(report.figures["arms"])
    colours = _colours(report.figures["arms"])
    figure = new_figure(7, 2.8)
    losses, gaps = figure.subplots(1, 2)
    for arm in ("native", "translated", *efforts, "no_context"):
        points = [(turn["turn"], turn["arms"][arm]["loss"]) for turn in turns if arm in turn["arms"]]
        if points:
            losses.plot(*zip(*points, strict=True), "o-", color=colours[arm], label=arm_name(arm), markersize=4)
    losses.set(xlabel="turn", ylabel="loss, nats per token", ylim=(0, None))
    losses.legend(fontsize=7, frameon=False)
    for turn in turns:
        for number, arm in enumerate(("translated", *efforts)):
            share = turn["arms"][arm]["gap_recovered"]
            if share is not None:
                place = turn["turn"] + 0.12 * number
                gaps.plot([place] * 2, [share["low"], share["high"]], color=colours[arm], linewidth=1.5)
                gaps.plot(place, share["value"], "o", color=colours[arm])
    first, last = losses.get_xlim()
    gaps.set(xlabel="turn", ylabel="gap recovered", xlim=(first, last + 0.12 * len(efforts)))
    for axes in (losses, gaps):
        axes.xaxis.get_major_locator().set_params(integer=True)
    _between_none_and_all(gaps.axhline)
    return figure


def plot_layers(report: FidelityReport) -> Any:
    """How close each layer's attention output is to the native one."""
    figure = new_figure(7, 2.6)
    axes = figure.subplots()
    style = {"markersize": 4, "clip_on": False}
    arms = report.figures["arms"]
    colours = _colours(arms)
    for arm in ("translated", *effort_arms(arms), "other_document", "no_context"):
        if arm in arms:
            cosines = layer_cosines(report.results, arm)
            axes.plot(range(len(cosines)), cosines, "o-", color=colours[arm], label=arm_name(arm), **style)
    axes.set(xlabel="target layer, among those that cache", ylabel="cosine with the native output", ylim=(None, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_once(axes)
    return figure


def plot_choices(report: FidelityReport) -> Any:
    """Accuracy of multiple-choice answers, with chance."""
    tasks = dict(list(report.figures["choices"].items())[:_MOST_ROWS])
    figure = new_figure(7, 1.2 + 0.6 * len(tasks))
    axes = figure.subplots()
    arms, colours = report.figures["arms"], _colours(report.figures["arms"])
    compared = ("native", "translated", *effort_arms(arms), "no_context")
    height = 0.8 / len(compared)
    for number, arm in enumerate(compared):
        places = [place + (number - (len(compared) - 1) / 2) * height for place in range(len(tasks))]
        accuracies = [task["accuracy"].get(arm, 0) for task in tasks.values()]
        axes.barh(places, accuracies, height * 0.9, color=colours[arm], label=arm_name(arm))
    for place, task in enumerate(tasks.values()):
        axes.plot([task["chance"]] * 2, [place - 0.45, place + 0.45], ":", color="#b33a3a", label="chance")
    axes.set_yticks(range(len(tasks)), [_short(name) for name in tasks])
    axes.set(xlabel="accuracy", xlim=(0, 1))
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    _legend_once(axes)
    return figure


def plot_probe(report: FidelityReport) -> Any:
    """Share of each planted corruption that the probe catches, against the share of right translations it refuses."""
    tokens = report.probe["tokens"]
    points = [point for point in report.probe["curve"] if point["tokens"] == tokens] or report.probe["curve"]
    points = sorted(points, key=lambda point: point["measured_false_alarms"])
    figure = new_figure(7, 2.8)
    axes = figure.subplots()
    for name in dict.fromkeys(name for point in points for name in point["caught"]):
        known = [
            (point["measured_false_alarms"], point["caught"][name]) for point in points if name in point["caught"]
        ]
        axes.plot(*zip(*known, strict=True), "o-", label=_short(name.replace("_", " ")), markersize=4, alpha=0.8)
    axes.set(
        xlabel="right translations refused, measured", ylabel=f"caught, {tokens:g} tokens read", ylim=(-0.03, 1.03)
    )
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _colours(arms: Iterable[str]) -> dict[str, str]:
    """Of each arm."""
    return _COLOURS | dict(zip(effort_arms(arms), itertools.cycle(_EFFORT_COLOURS)))


def _between_none_and_all(line: Any) -> None:
    for place in (0, 1):
        line(place, color="#bbbbbb", linewidth=0.8, zorder=0)


def _legend_once(axes: Any) -> None:
    """A legend above the axes, with each label once."""
    labels = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if labels:
        axes.legend(
            list(labels.values()),
            list(labels),
            fontsize=7,
            frameon=False,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(labels) if sum(map(len, labels)) <= _LONGEST_LEGEND else 3,
        )


def _short(name: str) -> str:
    """A name for an axis: printable, in one line, and not too long."""
    name = printable(" ".join(name.split()))
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
