import pytest

from hf_kvtransfer.fidelity.tables import Table, tables

from .evidence import WITH_EFFORTS, evaluation, make_report, passage


@pytest.fixture(scope="module")
def report():
    return make_report()


def test_markdown_holds_the_numbers(report):
    text = report.to_markdown()
    translated = report.figures["arms"]["translated"]
    gap = translated["gap_recovered"]
    worst = translated["worst_layer"]
    row = next(line for line in text.splitlines() if line.startswith("| the translated cache"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "the translated cache",
        f"{translated['loss']:.3f}",
        f"{translated['agreement']:.3f}",
        f"{translated['kl']:.3f}",
        f"{translated['cosine']:.3f}",
        f"{worst['cosine']:.3f} (layer {worst['layer']})",
        f"{gap['value']:.3f} [{gap['low']:.3f}, {gap['high']:.3f}]",
    ]
    for found in (
        "org/small--large",
        "org/large (cache: kind DynamicCache",
        "talk.jsonl (24 documents)",
        "torch 2.13.0",
    ):
        assert found in text
    assert "| late turns" in text and "each position weighs as much as the number of its turn" in text
    assert "too small" not in text


def test_tables_are_those_of_the_figures(report):
    arms, capabilities, turns, choices, probe = tables(report)
    assert [len(table.rows) for table in (arms, capabilities, turns, choices, probe)] == [5, 3, 4, 1, 2]
    for table in (arms, capabilities, turns, choices, probe):
        assert {len(row) for row in table.rows} == {len(table.header)}
    for (name, group), row in zip(report.figures["capabilities"].items(), capabilities.rows, strict=True):
        assert row[:3] == [name, "8", f"{group['positions']:,}"]
        assert row[4] == f"{group['arms']['translated']['loss']:.3f}"
        assert row[8] == f"{group['arms']['other_document']['gap_recovered']['value']:.3f}"
    late = report.figures["late_turns"]["arms"]["translated"]
    assert turns.rows[-1][0] == "late turns" and turns.rows[-1][4] == f"{late['loss']:.3f}"
    task = report.figures["choices"]["knowledge"]
    assert choices.rows[0][2:5] == [f"{x:.3f}" for x in (task["chance"], *list(task["accuracy"].values())[:2])]
    assert probe.header == ["tokens read", "false alarms asked", "measured", "other document", "shuffled tokens"]
    assert probe.rows[1] == ["32", "5 %", "4.7 %", "93 % (80 %)", "100 % (40 %)"]
    assert "32 tokens at 5 % false alarms, calibrated on 150 documents" in probe.note


def test_efforts_beside_the_translated_cache():
    report = make_report(evaluation(excess=WITH_EFFORTS))
    arms, capabilities, turns, choices, _ = tables(report)
    own, *efforts = (row[0] for row in arms.rows[1:4])
    assert (own, efforts) == ("the translated cache", ["the same, effort 0.05", "the same, effort 0.5"])
    gap = report.figures["late_turns"]["arms"]["effort 0.5"]["gap_recovered"]
    for table, plain in zip((capabilities, turns, choices), tables(make_report())[1:4], strict=True):
        assert {len(row) for row in table.rows} == {len(table.header)} == {len(plain.header) + 2}
        assert [name.removeprefix("gap, ") for name in table.header[-2:]] == ["effort 0.05", "effort 0.5"]
    assert turns.rows[-1][-1] == f"{gap['value']:.3f} [{gap['low']:.3f}, {gap['high']:.3f}]"
    assert choices.rows[0][-1] == f"{report.figures['choices']['knowledge']['accuracy']['effort 0.5']:.3f}"


def test_a_report_that_is_too_small():
    report = make_report([passage(native=2.0, translated=2.1, no_context=3.0)], probe=None)
    text = report.to_markdown()
    assert "Only 64 positions were scored, and at least 384 are needed: this report is too small to admit" in text
    assert "fewer than 8 documents" in text
    assert len(tables(report)) == 2
    assert tables(report)[0].rows[1][-1] == "-"


def test_arms_that_were_not_measured():
    report = make_report([passage(str(i), native=2.0, translated=2.1) for i in range(10)], probe=None)
    assert tables(report)[1].rows == [["text", "10", "640", "2.000", "2.100", "-", "0.500", "-", "-"]]


def test_markdown_of_awkward_cells():
    text = Table("Title", ["name", "n"], [["a|b\nc", "1"]], "A note.").to_markdown()
    assert text.splitlines() == [
        "### Title",
        "",
        "| name   |   n |",
        "| ------ | --: |",
        "| a\\|b c |   1 |",
        "",
        "A note.",
    ]


def test_native_layers_are_named():
    report = make_report(mapper={"name": "a", "digest": "b", "native_layers": 3})
    assert "Layers 0 to 3 are the target's own in every arm" in report.to_markdown()
    for mapper in ({"name": "a", "digest": "b", "native_layers": None}, {"name": "a", "digest": "b"}):
        assert "the target's own in every arm" not in make_report(mapper=mapper).to_markdown()
