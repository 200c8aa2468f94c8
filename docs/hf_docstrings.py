"""
Docstrings in the manner of transformers, as Markdown for the reference: `Args:` becomes a list, and names in brackets
become links. Used by mkdocs.yml.
"""

import re
from typing import Any

import griffe

import hf_kvtransfer


_SECTION = re.compile(r"(Args|Returns|Raises|Example|Examples):")
_REFERENCE = re.compile(r"\[`~?(?:\w+\.)*(\w+)(\.\w+)?`\](?![\[(])")


class HFDocstrings(griffe.Extension):
    """Rewrites each docstring when it is collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """
    Args:
        docstring (`str`):
            Without its indentation.
    """
    blocks: list[str] = []
    lines = iter([*docstring.splitlines(), "End:"])
    section, text = "", []
    for line in lines:
        name = _SECTION.match(line)
        if name is None and line != "End:":
            text.append(line)
            continue
        blocks.append(_section(section, text))
        section, text = ("" if name is None else name[1]), [] if name is None else [line[name.end() :]]
    return _REFERENCE.sub(_link, "\n\n".join(filter(None, blocks)))


def _section(name: str, lines: list[str]) -> str:
    body = "\n".join(line.removeprefix("    ") if name else line for line in lines).strip("\n ")
    if not name:
        return body
    return f"**{name}**\n\n{_items(body) if name == 'Args' else body}"


def _items(body: str) -> str:
    """Each argument, with its type, as an item; what is indented below it is said of it."""
    items = re.sub(r"(?<=,)\n(?=\w)", " ", body)  # several arguments that share a description
    items = re.sub(r"^(?=\w)", "- ", items, flags=re.MULTILINE)
    return re.sub(r"(?:(?<=- )|(?<=, ))(\w+)(?= \(\[?`)", r"**\1**", items)


def _link(match: re.Match) -> str:
    name, attribute = match[1], match[2] or ""
    if name not in hf_kvtransfer.__all__:
        return f"`{name}{attribute}`"
    return f"[`{name}{attribute}`][hf_kvtransfer.{name}{attribute}]"
