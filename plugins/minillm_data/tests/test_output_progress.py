"""A folder interrupted in the middle of a part resumes after the last progress record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import Interrupted
from minillm_data import output
from minillm_data.output import Output


class Killed(Exception):
    """A simulated kill of the process."""


def write(folder: Path, lines: list[bytes], stop: int | None = None) -> None:
    """Write the lines not yet processed; raise Killed after ``stop`` of all lines."""
    with Output(folder, "key") as out:
        for number in range(out.state.rows, len(lines)):
            out.write(lines[number])
            if number == stop:
                raise Killed
            out.dealt_with()
        out.finish({"rows": len(lines)})


@settings(max_examples=25)
@given(
    st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"") + b"\n"), max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(1, 200),
    st.sampled_from([0.0, 1000.0]),
)
def test_what_was_interrupted_ends_as_what_was_not(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    stops: list[int],
    part: int,
    noted: float,
) -> None:
    folder = tmp_path_factory.mktemp("output")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "PART", part)
        patch.setattr(output, "NOTED", noted)
        for stop in sorted(stops):
            if stop < len(lines):
                with pytest.raises(Killed):
                    write(folder / "out", lines, stop)
        write(folder / "out", lines)
        write(folder / "whole", lines)
    found = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (folder / "whole").iterdir()}
    assert b"".join(found[name] for name in sorted(found) if "part" in name) == b"".join(lines)


def test_a_note_costs_what_came_after_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "NOTED", 0.0)
    with pytest.raises(Killed):
        write(tmp_path / "out", [b"a\n", b"b\n", b"c\n"], stop=2)
    with Output(tmp_path / "out", "key") as out:
        assert (out.resumed, out.state.rows, out.state.open) == (True, 2, 4)
        assert "continues after 2 rows" in str(out.note)


@pytest.mark.parametrize("size", [0, 3])
def test_a_part_that_lost_its_end_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(output, "NOTED", 0.0)
    with pytest.raises(Killed):
        write(tmp_path / "out", [b"a\n", b"b\n", b"c\n"], stop=2)
    os.truncate(tmp_path / "out.unfinished" / "part-00000.jsonl.tmp", size)
    with Output(tmp_path / "out", "key") as out:
        assert (out.resumed, out.state.rows) == (False, 0)


def interrupt(folder: Path) -> None:
    with Output(folder, "key") as out:
        out.write(b"a\n")
        out.dealt_with()
        raise KeyboardInterrupt


def test_ctrl_c_says_where_it_goes_on_once_something_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(tmp_path / "out")
    monkeypatch.setattr(output, "NOTED", 0.0)
    with pytest.raises(Interrupted) as stopped:
        interrupt(tmp_path / "out")
    assert "the same command continues from there" in str(stopped.value)
    assert stopped.value.exit_code == 130
