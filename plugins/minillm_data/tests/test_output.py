"""The output folder of a command: atomic, and resumed by the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm_core import DataError
from minillm_core.documents import find
from minillm_data import output as module
from minillm_data.output import Output


def write(folder: Path, rows: int, key: str = "k", until: int | None = None) -> bool:
    """Write rows of 10 bytes, stopping after one of them as a kill does; return whether it resumed."""
    with Output(folder, key) as output:
        for row in range(output.state.rows, rows):
            if row == until:
                return output.resumed
            output.state.counts["kept"] += 1
            output.write(b"%09d\n" % row)
            output.dealt_with()
        output.finish({"kept": output.state.counts["kept"]}, "<p>page</p>")
        return output.resumed


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("until", [0, 1, 4, 5, 6, 11, 12])
def test_a_stopped_command_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    monkeypatch.setattr(module, "PART", 50)
    assert not write(tmp_path / "whole", 12)
    whole = content(tmp_path / "whole")
    assert sorted(whole) == [
        *(f"part-0000{n}.jsonl" for n in range(3)),
        "report.htm",
        "report.json",
    ]
    assert b"".join(whole[name] for name in sorted(whole) if "part" in name) == b"".join(
        b"%09d\n" % row for row in range(12)
    )
    write(tmp_path / "a", 12, until=until)
    assert (tmp_path / "a").exists() == (until == 12)
    if until < 12:
        assert write(tmp_path / "a", 12) == (until >= 5)
    assert content(tmp_path / "a") == whole
    assert not (tmp_path / "a.unfinished").exists()


def test_a_part_that_has_its_name_and_is_not_noted_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 50)
    assert not write(tmp_path / "whole", 12)
    monkeypatch.setattr(module, "NOTED", 0.0)  # after every row
    noted, noting = [0], Output.note_progress

    def killed(output: Output) -> None:
        noted[0] += 1
        if noted[0] == 10:  # the second part, renamed just now
            raise KeyboardInterrupt
        noting(output)

    monkeypatch.setattr(Output, "note_progress", killed)
    with pytest.raises(module.Interrupted):
        write(tmp_path / "a", 12)
    unfinished = tmp_path / "a.unfinished"
    assert (unfinished / "part-00001.jsonl").exists()
    monkeypatch.setattr(Output, "note_progress", noting)
    assert write(tmp_path / "a", 12)
    assert content(tmp_path / "a") == content(tmp_path / "whole")


def test_only_the_parts_of_a_folder_are_data(tmp_path: Path) -> None:
    write(tmp_path / "a", 3)
    assert [one.path.name for one in find([str(tmp_path / "a")], lambda line: None)] == [
        "part-00000.jsonl"
    ]


def test_another_command_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 50)
    write(tmp_path / "a", 12, "one", until=7)
    assert not write(tmp_path / "a", 3, "another")
    assert content(tmp_path / "a")["part-00000.jsonl"].count(b"\n") == 3


def test_what_is_there_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", 2)  # empty
    for there in ("a", "file"):
        if there == "file":
            (tmp_path / there).write_text("mine")
        with pytest.raises(DataError, match="there is something already") as raised:
            Output(tmp_path / there, "k")
        assert "--to" in str(raised.value.fix)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="cannot replace the current folder"):
        Output(Path(), "k")
    (tmp_path / "b.unfinished").mkdir()
    (tmp_path / "b.unfinished" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not of this command"):
        Output(tmp_path / "b", "k")
    assert (tmp_path / "b.unfinished" / "notes.txt").read_text() == "mine"


def test_a_start_that_was_killed_before_it_had_its_lock_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "a.unfinished").mkdir()
    assert not write(tmp_path / "a", 3)


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    with (
        Output(tmp_path / "a", "k"),
        pytest.raises(DataError, match="another process is writing this folder"),
    ):
        Output(tmp_path / "a", "k")
    with Output(tmp_path / "a", "k"):
        pass


def test_a_torn_state_is_a_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 50)
    write(tmp_path / "a", 12, until=7)
    state = tmp_path / "a.unfinished" / "progress.json"
    state.write_bytes(state.read_bytes()[:-3])
    assert not write(tmp_path / "a", 12)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot be written") as raised:
        Output(tmp_path / "file" / "a", "k")
    assert "--to" in str(raised.value.fix)
