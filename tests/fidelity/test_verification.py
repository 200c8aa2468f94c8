"""Edits by somebody who also writes a digest that fits: the numbers still have to follow from each other."""

import hashlib
import json

import pytest

from hf_kvtransfer.errors import EvidenceError
from hf_kvtransfer.fidelity.report import FidelityReport

from .evidence import make_report


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_report().save(tmp_path_factory.mktemp("mapper")).read_text()


def signed(payload: dict, old: str = "", new: str = "") -> str:
    """The text of a file with this content, `old` replaced by `new`, and a digest that fits."""
    entries = {name: value for name, value in payload.items() if name != "digest"}
    text = json.dumps(entries, indent=1).removesuffix("\n}").replace(old, new) + ",\n"
    return f'{text}  "digest": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'


def fewer_results(payload):
    del payload["results"][-3:]


def repeated_results(payload):
    payload["results"] += payload["results"]


def set_entry(*path):
    *path, key, value = path

    def edit(payload):
        for entry in path:
            payload = payload[entry]
        payload[key] = value

    return edit


def remove(name):
    return lambda payload: payload.pop(name)


ARM = ("figures", "arms", "translated")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (fewer_results, r"`figures\.positions` is \d+, but the results give \d+"),
        (set_entry("figures", "positions", 9999), r"`figures\.positions` is 9999, but the results give \d+"),
        (set_entry("figures", "documents", 9999), r"`figures\.documents` is 9999"),
        (set_entry("figures", "sufficient", 1), r"`figures\.sufficient` is 1"),
        (repeated_results, "there twice"),
        (set_entry(*ARM, "loss", 2.5), r"`figures\.arms\.translated\.loss` is 2\.5"),
        (set_entry(*ARM, "loss", None), r"`figures\.arms\.translated\.loss` is None"),
        (set_entry(*ARM, "agreement", 0.99), r"translated\.agreement` is 0\.99"),
        (set_entry(*ARM, "cosine", 0.99), r"translated\.cosine` is 0\.99"),
        (set_entry(*ARM, "worst_layer", "layer", 3.0), r"worst_layer\.layer` is 3\.0"),
        (set_entry(*ARM, "gap_recovered", "value", 0.99), r"gap_recovered\.value` is 0\.99"),
        (set_entry(*ARM, "gap_recovered", "low", "0.9"), "impossible interval, '0.9' to"),
        (set_entry(*ARM, "gap_recovered", "low", 9.0), r"impossible interval, 9\.0 to"),
        (set_entry(*ARM, "gap_recovered", 0.99), "is 0.99, not a value with an interval"),
        (
            set_entry("figures", "capabilities", "code", "arms", "translated", "gap_recovered", "value", 0.99),
            r"capabilities\.code\.arms\.translated\.gap_recovered\.value` is 0\.99",
        ),
        (set_entry("figures", "capabilities", {}), r"`figures\.capabilities` does not have the entries \['code'"),
        (set_entry("figures", "turns", 1, "positions", 7), r"`figures\.turns\[1\]\.positions` is 7"),
        (set_entry("figures", "turns", []), r"`figures\.turns` does not have the 3 entries"),
        (set_entry("figures", "late_turns", None), r"`figures\.late_turns` does not have the entries"),
        (set_entry("figures", "late_turns", "weights", "none"), r"late_turns\.weights` is 'none'"),
        (set_entry("figures", "choices", "knowledge", "accuracy", "native", 1), r"accuracy\.native` is 1"),
        (set_entry("figures", None), "no figures"),
        (set_entry("figures", []), "`figures` does not have the entries"),
        (set_entry("results", {}), "no list of results"),
        (set_entry("results", []), "nothing was scored"),
        (set_entry("results", 0, 3), "missing, unknown or damaged fields"),
        (set_entry("results", 0, "arms", "translated", "loss", -1.0), "Result 0 .* below 0"),
        (
            set_entry("results", 0, "arms", "translated", "cosine", 0, 10**30),
            "Result 0 .* not a list of finite numbers",
        ),
        (set_entry("data", {}), "`data` is {}, not a list"),
        (set_entry("data", ["talk.jsonl"]), "not a list of dicts"),
        (set_entry("settings", None), "`settings` is None, not a dict"),
        (set_entry("created", 2026), "`created` is 2026, not a str"),
        (set_entry("mapper", "digest", 12), "`mapper` has no `digest` that is a str"),
        (set_entry("mapper", None), "`mapper` has no `name` that is a str"),
        (set_entry("source", "identity", None), "`source` has no `identity` that is a dict"),
        (set_entry("target", "cache_policy", None), "`target` has no `cache_policy` that is a dict"),
        (set_entry("probe", []), "`probe` lacks its curve"),
        (set_entry("probe", "curve", None), "`probe` lacks its curve"),
        (set_entry("probe", "tokens", "32"), "`probe` lacks its curve or one of its numbers"),
        (set_entry("probe", "curve", 1, "caught", {"x": "all"}), r"`probe\.curve\[1\]` is .*not a point"),
        (set_entry("probe", "curve", 0, []), r"`probe\.curve\[0\]` is \[\], not a point"),
        (set_entry("extra", 1), "missing or unknown entries: extra"),
        (remove("settings"), "missing or unknown entries: settings"),
    ],
)
def test_an_edit_with_a_fresh_digest_is_refused(text, tmp_path, edit, reason):
    file = tmp_path / "fidelity.json"
    payload = json.loads(text)
    file.write_text(signed(payload))
    FidelityReport.load(file)
    edit(payload)
    file.write_text(signed(payload))
    with pytest.raises(EvidenceError, match=rf"fidelity\.json is no evidence: .*{reason}.*`hf-kvtransfer evaluate"):
        FidelityReport.load(file)


def test_an_overflowing_number(text, tmp_path):
    file = tmp_path / "fidelity.json"
    payload = json.loads(text)
    payload["results"][0]["arms"]["translated"]["kl"] = "huge"
    file.write_text(signed(payload, '"huge"', "1e999"))
    with pytest.raises(EvidenceError, match="`kl` is inf"):
        FidelityReport.load(file)
