"""docs/known-reports.md: the tests that it names exist, and name the reports that it says they are about."""

import ast
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "known-reports.md").read_text(encoding="utf-8")
ROWS = [
    (reports.split(", "), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", here))
    for reports, here in re.findall(r"^\| (.*?) \|.*\| (.*?) \|$", TABLE, flags=re.MULTILINE)
    if reports != "reports"
]


def source_of(path, name):
    """A test with its decorators and the comments right above it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    node = next(node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    lines = text.splitlines()
    while lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


@pytest.mark.parametrize(("path", "name"), sorted({test for _, tests in ROWS for test in tests}))
def test_each_test_names_its_reports(path, name):
    text = source_of(path, name)
    for reports, tests in ROWS:
        if (path, name) in tests:
            assert [report for report in reports if report not in text] == []


def test_each_row_has_a_test_or_a_reason():
    assert len(ROWS) > 40
    bare = [line for line in TABLE.splitlines() if re.fullmatch(r"\|.*\|.*\|\s*\|", line)]
    assert bare == []


# huggingface/peft#2821, huggingface/peft#2737, transformers#48479, generative-computing/mellea#367, Sundial#5,
# DeepSeek-Coder-V2#81, guidance-ai/guidance#1149
def test_no_attribute_of_caches_that_was_removed_is_used():
    gone = re.compile(
        r"\b(key_cache|value_cache|seen_tokens|from_legacy_cache|to_legacy_cache|get_usable_length|get_max_cache_shape"
        r"|max_batch_size|cache_position|HybridCache)\b"
    )
    found = {
        str(path): gone.findall(path.read_text(encoding="utf-8")) for path in (ROOT / "hf_kvtransfer").rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}
