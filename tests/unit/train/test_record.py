"""Tests of run.json and its folder: refusals, contents, and atomic writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from minillm_core.errors import Refusal
from minillm_core.train.record import (
    ABLATION,
    RUN,
    Record,
    choose_out,
    claim_out,
    hardware,
    read_record,
    versions,
)
from minillm_core.train.run_folder import RunFolder


def test_the_first_free_number_is_taken(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert choose_out("tiny", runs=runs) == runs / "tiny-1"
    assert not runs.exists()
    for n in (1, 2, 4):
        (runs / f"tiny-{n}").mkdir(parents=True)
    assert choose_out("tiny", runs=runs) == runs / "tiny-3"
    assert choose_out("small", runs=runs) == runs / "small-1"
    assert claim_out("tiny", runs=runs) == runs / "tiny-3"
    assert claim_out("tiny", runs=runs) == runs / "tiny-5"


def test_two_runs_never_claim_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir
    taken = []

    def mkdir(path: Path, *args, **options) -> None:
        if not taken:  # another process was faster
            taken.append(path)
            real(path, parents=True)
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert claim_out("tiny", runs=tmp_path) == tmp_path / "tiny-2"
    assert taken == [tmp_path / "tiny-1"]


def test_a_folder_that_is_named_may_be_there(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert claim_out("tiny", out) == out
    (out / "notes.txt").write_text("mine")
    assert claim_out("tiny", out) == out


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("{}")
    for choose in (choose_out, claim_out):
        with pytest.raises(Refusal, match="holds a run already") as error:
            choose("tiny", tmp_path)
        assert error.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [RUN]


@pytest.mark.parametrize(
    ("name", "what"), [(ABLATION, "an ablation"), ("config.json", "a model directory")]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_an_ablation_or_a_model_is_refused(
    resume: bool, name: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("{}")
    for choose in (choose_out, claim_out):
        with pytest.raises(Refusal, match=f"holds {what}"):
            choose("tiny", tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    for out in (file, file / "below"):
        with pytest.raises(Refusal, match="nothing can be written"):
            choose_out("tiny", out)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refusal, match="nothing can be written"):
        choose_out("tiny", tmp_path / "dangling")


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(Refusal, match="no permission") as error:
        choose_out("tiny", tmp_path / "deep" / "out")
    assert "no permission" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_refuses_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args, **options) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Refusal, match="nothing can be written") as error:
        claim_out("tiny", tmp_path / "out")
    assert "Read-only" in str(error.value)


def test_the_record_is_replaced_whole(tmp_path: Path) -> None:
    record = Record(tmp_path, {"config": {}, "plan_hash": "ab", "seed": 1})
    path = tmp_path / RUN
    assert json.loads(path.read_text())["exit"] is None
    before = path.stat().st_ino
    record.update(exit=75, plugins=[{"name": "muon", "title": "µ"}])
    assert path.stat().st_ino != before
    assert "µ" in path.read_text("utf-8")
    assert read_record(tmp_path)["exit"] == 75
    assert [each.name for each in tmp_path.iterdir()] == [RUN]


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "{", '{"config": {}}', "[" * 100_000])
def test_what_is_no_record_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RUN).write_text(content)
    with pytest.raises(Refusal):
        read_record(tmp_path)


def test_versions_and_hardware_are_facts_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = versions("torch", ["no-such-distribution"])
    assert found["python"]
    assert found["numpy"]
    assert "torch" in found
    assert "mlx" not in found
    assert found["no-such-distribution"] is None
    machine = hardware("a CPU")
    assert machine["device"] == "a CPU"
    assert machine["cores"] >= 1
    text = json.dumps([found, machine])
    assert "hunter2" not in text
    assert os.uname().nodename not in text


def test_a_model_directory_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(Refusal, match="holds no run") as refused:
        read_record(tmp_path)
    assert f"--init {tmp_path} starts from its weights" in str(refused.value)


def test_a_step_of_a_run_is_told_the_options_for_it(tmp_path: Path) -> None:
    (tmp_path / RUN).touch()
    with pytest.raises(Refusal, match="@2 holds no run") as refused:
        read_record(Path(f"{tmp_path}@2"))
    assert str(refused.value.fix).startswith(f"{tmp_path}: only --branch and --init take RUN@STEP")
    with pytest.raises(Refusal, match="@2 holds no run"):  # to resume, as well
        RunFolder.find(Path(f"{tmp_path}@2"))


@pytest.mark.parametrize("wrong", ["config", "plan_hash", "plugins", "resumed"])
def test_a_record_with_an_entry_of_another_type_is_refused(tmp_path: Path, wrong: str) -> None:
    document = {"config": {}, "plan_hash": "", "plugins": [], "resumed": []}
    (tmp_path / RUN).write_text(json.dumps({**document, wrong: 3}))
    with pytest.raises(Refusal, match="is not the record of a run") as refused:
        read_record(tmp_path)
    assert refused.value.where == wrong
