"""Tables that are made stand between their marks, and nothing else of a page changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.page import Part, table
from benchmarks.provenance import machine, unique

PROSE = st.text("ab <!->\n", max_size=30)
PART = Part(Path("page.md"), lambda: "| made |\n")


@given(PROSE, PROSE, PROSE)
def test_only_what_is_between_the_marks_changes(before: str, old: str, after: str) -> None:
    page = f"{before}<!-- measured -->\n{old}<!-- /measured -->{after}"
    again = PART.within(page)
    assert again == f"{before}<!-- measured -->\n| made |\n<!-- /measured -->{after}"
    assert PART.within(again) == again


@pytest.mark.parametrize(
    "page",
    [
        "# A page",
        "<!-- measured -->\nwithout an end",
        "<!-- measured -->\n<!-- /measured -->" * 2,
        "<!-- measured -->\n<!-- /measured --> and <!-- /measured -->",
    ],
)
def test_a_page_without_each_mark_once_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="measured"):
        PART.within(page)


def test_it_is_printed_or_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.page.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(empty := "<!-- measured -->\n<!-- /measured -->\n")
    part = Part(page, PART.made)
    monkeypatch.setattr("sys.argv", ["page"])
    part.main("about")
    assert (capsys.readouterr().out, page.read_text()) == ("| made |\n", empty)
    monkeypatch.setattr("sys.argv", ["page", "--write"])
    part.main("about")
    assert page.read_text() == "<!-- measured -->\n| made |\n<!-- /measured -->\n"


def test_columns_are_text_or_numbers() -> None:
    assert table(("a", "b", "c"), [("x", "1", "y")], text=(0, -1)).splitlines() == [
        "| a | b | c |",
        "| --- | --: | --- |",
        "| x | 1 | y |",
    ]


def test_what_it_was_measured_on_is_said_in_words() -> None:
    hardware = {"gpus": [], "cores": 2, "processor": "A chip", "system": "Linux 6.1"}
    versions = {"python": "3.11", "torch": "2.13", "mlx": None}
    environment = {"hardware": hardware, "versions": versions, "commit": "0123456789-dirty"}
    said = "2 cores (A chip), Linux; Python 3.11, PyTorch 2.13; commit 0123456-dirty"
    assert machine({"environment": environment}) == said
    hardware["gpus"] = [{"name": "H100"}, {"name": "H100"}]
    assert machine({"environment": environment}).startswith("one H100, Linux; ")
    assert unique(["a", None, "b", "a"]) == "a and b"
