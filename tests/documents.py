"""What README and docs are made of."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[1]
CONTEXT = (ROOT / "examples" / "harbour.txt").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
