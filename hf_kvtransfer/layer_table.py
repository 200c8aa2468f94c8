"""A mapper's layers as a table: which source layers each target layer reads, and what that explains and takes."""

from typing import Any

from .fidelity.tables import Table
from .mapper import KVMapper
from .maps.storage import num_bytes


_READ, _UNREAD = "█", "·"
_ABSENT = "-"


def layer_table(mapper: KVMapper) -> Table:
    """
    Draw what a mapper reads, one row for each target layer, one character for each source layer; `+2` behind a kind
    are the tokens before each token that it reads, too.

    Args:
        mapper ([`KVMapper`]):
            Any; what a layer explains is there if [`fit_mapper`] made it.
    """
    config = mapper.config
    width = len(mapper.source_geometry.layers)
    reports = (config.fit or {}).get("layers") or [None] * len(config.layers)
    exact = (config.fit or {}).get("exact_layers") or ()
    rows = []
    for i, (spec, report) in enumerate(zip(config.layers, reports, strict=True)):
        if spec is None:
            rows.append([str(i), "", "shares another's", _ABSENT, _ABSENT, _ABSENT])
        elif spec["kind"] == "native":
            rows.append([str(i), "", "native", "0", "1.000", "1.000"])
        else:
            read = set(spec["source_layers"])
            drawn = "".join(_READ if j in read else _UNREAD for j in range(width))
            size = f"{num_bytes(mapper.layers[i]) / 1e6:.2f}"
            kind = "exact copy" if i in exact else spec["kind"].replace("_", " ")
            kind += f" +{spec['previous_tokens']}" if "previous_tokens" in spec else ""
            rows.append([str(i), drawn, kind, size, *_explained(report)])
    ruler = "0" + str(width - 1).rjust(width - 1) if width > 1 else "0"  # the first and the last, where they stand
    return Table(
        f"Target layers, and which of the source's {width} layers they read",
        ["layer", ruler, "kind", "MB", "keys explained", "values explained"],
        rows,
    )


def explained_variance(mapper: KVMapper) -> dict[str, Any] | None:
    """
    What the maps explain of held-out keys and values, over the mapped layers: means, and the layer that explains
    least. `None` if the mapper does not say.
    """
    reports = (mapper.config.fit or {}).get("layers") or []
    known = {i: reports[i]["explained_variance"] for i in mapper.config.mapped_layers if i < len(reports)}
    if not known:
        return None
    worst = min(known, key=lambda i: min(known[i]))
    keys, values = (sum(parts) / len(known) for parts in zip(*known.values(), strict=True))
    return {"keys": keys, "values": values, "worst": {"layer": worst, "value": min(known[worst])}}


def _explained(report: dict[str, Any] | None) -> list[str]:
    if report is None or "explained_variance" not in report:
        return [_ABSENT, _ABSENT]
    return [f"{value:.3f}" for value in report["explained_variance"]]
