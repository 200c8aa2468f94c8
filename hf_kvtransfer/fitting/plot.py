"""What a fit has chosen, as a picture."""

from typing import Any

from ..mapper import KVMapperConfig
from ..plotting import new_figure, printable


# Inches for a source layer across and a target layer down, so that a deep pair can still be read.
_CELL = 0.22


def plot_selection(config: KVMapperConfig) -> Any:
    """
    Draw which source layers each target layer reads, with what that explains and what it takes beside it, as
    [`fit_mapper`] left it.

    Args:
        config ([`KVMapperConfig`]):
            Of a mapper made by [`fit_mapper`].

    Returns:
        `matplotlib.figure.Figure`: Target layers from top to bottom, source layers from left to right. A filled cell
        is read; the rows of native layers are grey; `+2` are the tokens before each token that are read, too.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: the mapper was not made by [`fit_mapper`] of this version, and does not say what its layers are
            worth.
    """
    source, _ = config.validate_layout()
    reports = (config.fit or {}).get("layers")
    if not reports or any(report is not None and "bytes" not in report for report in reports):
        raise ValueError(
            "The mapper's config does not say what its layers explain and take: fit it with `fit_mapper`."
        )
    rows, columns = len(config.layers), len(source.layers)
    figure = new_figure(_CELL * columns + 6, _CELL * rows + 1.5)
    cells, errors, sizes = figure.subplots(1, 3, sharey=True, width_ratios=[_CELL * columns + 1, 2, 1.5])
    layers = range(rows)
    read = [[0.0] * columns for _ in layers]
    for i, spec in enumerate(config.layers):
        if spec is None or spec["kind"] == "native":
            read[i] = [0.35] * columns
        else:
            for j in spec["source_layers"]:
                read[i][j] = 1.0
    cells.imshow(read, cmap="Greys", vmin=0, vmax=1.2, aspect="auto")
    before = [0 if spec is None else spec.get("previous_tokens", 0) for spec in config.layers]
    names = [f"+{number}   {i}" if number else str(i) for i, number in enumerate(before)]
    cells.set(xlabel="source layer", ylabel="target layer", xticks=range(columns))
    cells.set_yticks(layers, names)
    cells.tick_params(labelsize=7)
    for part, name, height in ((0, "keys", -0.2), (1, "values", 0.2)):
        unexplained = [0.0 if report is None else 1 - report["explained_variance"][part] for report in reports]
        errors.barh([i + height for i in layers], unexplained, height=0.4, label=name)
    errors.set(xlabel="unexplained variance", xlim=(0, None))
    errors.legend(fontsize=7)
    megabytes = [0.0 if report is None else report["bytes"] / 1e6 for report in reports]
    sizes.barh(list(layers), megabytes, color="grey")
    sizes.set(xlabel=f"MB, {sum(megabytes):.1f} in all")
    figure.suptitle(printable(f"{config.source['name']} to {config.target['name']}"), fontsize=9)
    return figure
