"""Figures, which need matplotlib, and how they get into a page."""

import io
import warnings
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: Any = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: it can be read out, searched, and is small
    "text.parse_math": False,  # names may hold dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def new_figure(width: float, height: float) -> Any:
    """
    An empty `matplotlib.figure.Figure` of a size in inches.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plots are drawn with matplotlib: `pip install matplotlib`, or hf-kvtransfer[fit]."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def inline_svg(draw: Callable[[], Any], name: str, description: str) -> str:
    """
    Draw a figure as an `<svg>` element that stands in a page beside others.

    Args:
        draw (`Callable`):
            Makes the `matplotlib.figure.Figure`.
        name (`str`):
            Put before the ids in it, so that those of several figures differ.
        description (`str`):
            For those who cannot see it.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    new_figure(1, 1)  # says so if there is no matplotlib
    import matplotlib

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        # It measures text with a font of its own; a browser has others.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        file = io.StringIO()
        draw().savefig(file, format="svg")
    root = ElementTree.fromstring(file.getvalue())
    for element in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(element)
    for element in root.iter():
        for attribute, value in element.attrib.items():
            if attribute == "id":
                element.set(attribute, f"{name}-{value}")
            elif attribute == f"{{{_XLINK}}}href" and value.startswith("#"):
                element.set(attribute, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(attribute, value.replace("url(#", f"url(#{name}-"))
    root.attrib |= {"role": "img", "aria-label": description}
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def printable(text: str) -> str:
    """Text without what neither a page nor a figure can hold, such as NUL or half of a surrogate pair."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
