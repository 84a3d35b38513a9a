"""Tests of the checkpoint that a run resumes from, and of invalid checkpoints."""

from __future__ import annotations

import shlex
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import disk
from minillm_core.checkpoint import layout
from minillm_core.checkpoint.commit import commit, retain, sweep
from minillm_core.checkpoint.manifest import Opened, verify
from minillm_core.checkpoint.read import (
    Checkpoint,
    chosen_or_refuse,
    newest,
    newest_and_set_aside,
    newest_or_refuse,
)
from minillm_core.errors import MinillmError, NoCheckpoint, Refusal

STATE = {"model.w": np.arange(6, dtype=np.float32)}


def spoil(path: Path) -> None:
    (path / "state.json").write_bytes(b"[]")


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_none_was_ever_written(tmp_path: Path) -> None:
    assert newest_and_set_aside(tmp_path, pytest.fail) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.tmp-0a").mkdir()
    (tmp_path / "checkpoints" / "notes.corrupt").mkdir()
    assert newest_and_set_aside(tmp_path, pytest.fail) is None
    with pytest.raises(Refusal, match="the run has no checkpoint"):
        newest_or_refuse(tmp_path)
    spaced = tmp_path / "my run"
    with pytest.raises(Refusal) as refused:
        newest_or_refuse(spaced)
    assert f"--out {shlex.quote(str(spaced))} continues training" in str(refused.value.fix)
    (spaced / "checkpoints").mkdir(parents=True)
    commit(spaced, 3, STATE, {"step": 3})
    with pytest.raises(Refusal) as refused:
        chosen_or_refuse(spaced, step=2)
    assert refused.value.fix == "one of the steps 3: --step 3"


@settings(max_examples=25, deadline=None)
@given(good=st.lists(st.booleans(), max_size=5))
def test_the_newest_good_one_is_taken_and_bad_newer_ones_go_aside(
    tmp_path_factory: pytest.TempPathFactory, good: list[bool]
) -> None:
    out = tmp_path_factory.mktemp("out")
    for step, is_good in enumerate(good, 1):
        path = commit(out, step, STATE, {"step": step})
        if not is_good:
            spoil(path)
    told: list[str] = []
    last = max((step for step, is_good in enumerate(good, 1) if is_good), default=0)
    newer = range(len(good), last, -1)
    for _ in range(2):  # now, and at every later try
        if last:
            found = newest_and_set_aside(out, told.append)
            assert found is not None
            assert (found.step, found.scalars) == (last, {"step": last})
            assert newest_or_refuse(out).step == last
        elif good:
            with pytest.raises(NoCheckpoint, match="only step-") as error:
                newest_and_set_aside(out, told.append)
            assert error.value.exit_code == 4
            with pytest.raises(NoCheckpoint, match="only step-"):
                newest_or_refuse(out)
        else:
            assert newest_and_set_aside(out, told.append) is None
    assert len(told) == len(newer)  # reported once
    for line, step in zip(told, newer, strict=True):
        assert f"step-{step:08d} does not verify and is now step-{step:08d}.corrupt: " in line
        assert "state.json: " in line
        assert (out / "checkpoints" / f"step-{step:08d}.corrupt").is_dir()
    if good:  # older invalid ones were not checked
        assert len(names(out)) == len(good)


def test_one_step_can_be_corrupt_more_than_once(tmp_path: Path) -> None:
    commit(tmp_path, 1, STATE, {})
    for _ in range(3):
        spoil(commit(tmp_path, 12, STATE, {}))
        found = newest_and_set_aside(tmp_path, lambda line: None)
        assert found
        assert found.step == 1
    corrupt = ["step-00000012.corrupt", "step-00000012.corrupt-2", "step-00000012.corrupt-3"]
    assert names(tmp_path) == ["step-00000001", *corrupt]
    assert sweep(tmp_path) == []


def test_a_person_who_deletes_them_may_start_afresh(tmp_path: Path) -> None:
    spoil(commit(tmp_path, 1, STATE, {}))
    with pytest.raises(NoCheckpoint, match=r"(?s)only step-00000001\.corrupt is left.*delete"):
        newest_and_set_aside(tmp_path, lambda line: None)
    (corrupt,) = (tmp_path / "checkpoints").iterdir()
    disk.rename(corrupt, tmp_path / "elsewhere")
    assert newest_and_set_aside(tmp_path, pytest.fail) is None


def test_many_corrupt_ones_make_no_long_message(tmp_path: Path) -> None:
    for step in range(1, 9):
        spoil(commit(tmp_path, step, STATE, {}))
    with pytest.raises(NoCheckpoint, match="and 5 more are left") as error:
        newest_and_set_aside(tmp_path, lambda line: None)
    assert len(str(error.value).splitlines()) <= 12


def test_what_cannot_be_renamed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(commit(tmp_path, 1, STATE, {}))

    def refuse(*_args, **_named) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "rename", refuse)
    with pytest.raises(MinillmError, match="cannot be renamed: Permission denied"):
        newest_and_set_aside(tmp_path, lambda line: None)


def test_a_reader_renames_nothing(tmp_path: Path) -> None:
    commit(tmp_path, 1, STATE, {})
    spoil(commit(tmp_path, 2, STATE, {}))
    before = names(tmp_path)
    told: list[str] = []
    assert newest_or_refuse(tmp_path, told.append).step == 1
    found = newest(tmp_path)
    assert found
    assert not verify(found.path)
    assert names(tmp_path) == before
    assert len(told) == 1


def test_what_is_removed_after_it_was_found_can_still_be_read(tmp_path: Path) -> None:
    commit(tmp_path, 1, STATE, {"step": 1})
    found = newest_or_refuse(tmp_path)
    commit(tmp_path, 2, {"model.w": STATE["model.w"] + 1}, {"step": 2})
    retain(tmp_path, 1)
    assert not found.path.exists()
    np.testing.assert_array_equal(found.arrays()["model.w"], STATE["model.w"])
    assert found.scalars == {"step": 1}


def test_what_is_removed_before_it_is_opened_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = commit(tmp_path, 1, STATE, {})
    found = Checkpoint(path, 1)
    shutil.rmtree(path)
    for read in (found.arrays, lambda: found.scalars):
        with pytest.raises(NoCheckpoint, match=r"(?s)cannot be read any more.*try again"):
            read()


def test_what_is_cut_after_it_verified_is_an_error(tmp_path: Path) -> None:
    path = commit(tmp_path, 1, STATE, {})
    found = newest_or_refuse(tmp_path)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(NoCheckpoint, match="cannot be read any more"):
        found.arrays()


def test_rows_are_read_when_they_are_needed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = np.arange(60, dtype=np.float32).reshape(12, 5)
    arrays = {
        "model.w@0": whole[:7],
        "model.w@7": whole[7:],
        "model.one": np.float32(3).reshape(()),
    }
    folder, asked = commit(tmp_path, 1, arrays, {}), list[int]()
    found, fill = Checkpoint(folder, 1).deferred("model."), Opened.fill
    monkeypatch.setattr(Opened, "fill", lambda *given: asked.append(len(given[-1])) or fill(*given))
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        "model.w": ((12, 5), np.float32),
        "model.one": ((), np.float32),
    }
    assert asked == []
    for first, last in ((0, 2), (5, 9), (7, 12), (3, 3), (0, 12)):
        assert np.array_equal(found["model.w"][first:last], whole[first:last])
    assert sum(asked) == 4 * 5 * (2 + 4 + 5 + 0 + 12)
    assert np.array_equal(np.asarray(found["model.w"]), whole)
    assert np.asarray(found["model.one"]) == 3
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(NoCheckpoint, match="ends before byte"):
        np.asarray(found["model.w"])


def test_what_is_removed_while_it_is_verified_makes_room_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer replaces every listed checkpoint before the first one is opened."""
    for step in (1, 2):
        commit(tmp_path, step, STATE, {})
    real, listed = layout.folders, []

    def folders(out: Path) -> list[tuple[int, Path]]:
        found = real(out)
        listed.append(found)
        if len(listed) == 1:
            commit(out, 3, STATE, {})
            for _, path in found:
                shutil.rmtree(path)
        return found

    monkeypatch.setattr(layout, "folders", folders)
    assert newest_or_refuse(tmp_path, pytest.fail).step == 3
    assert len(listed) == 2


def test_a_reader_beside_a_trainer_sees_whole_checkpoints_only(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, np.ndarray]:
        return {name: np.full(500, step, np.float32) for name in ("model.w", "optimizer.m.w")}

    stop = threading.Event()
    commit(tmp_path, 1, state(1), {"step": 1})

    def train() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            commit(tmp_path, step, state(step), {"step": step})
            retain(tmp_path, 1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        last = 0
        while last < 60:
            assert trainer.is_alive()
            found = newest_or_refuse(tmp_path, pytest.fail)
            arrays = found.arrays()
            assert arrays.keys() == {"model.w", "optimizer.m.w"}
            assert all((array == found.step).all() for array in arrays.values())
            assert found.scalars == {"step": found.step}
            assert found.step >= last
            last = found.step
    finally:
        stop.set()
        trainer.join()


def test_of_very_many_bad_ones_only_some_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 301):
        layout.folder(tmp_path, step).mkdir(parents=True)
    said: list[str] = []
    assert newest(tmp_path, said.append) is None
    assert len(said) < 10
    assert "292 more" in said[-1]
    synced: list[Path] = []
    monkeypatch.setattr("minillm_core.disk.sync", synced.append)
    said.clear()
    with pytest.raises(NoCheckpoint):
        newest_and_set_aside(tmp_path, said.append)
    assert len(said) < 10
    assert "292 older ones" in said[-1]
    assert len(synced) == 1
    assert len(list((tmp_path / "checkpoints").glob("*.corrupt"))) == 300


def test_half_written_files_of_every_kind_are_swept(tmp_path: Path) -> None:
    half = ["run.json", "run.toml", "metrics.jsonl", "tokenizer.json", "report.html"]
    (tmp_path / "checkpoints").mkdir()
    kept = ["run.json", "tokenizer.json", "mine.tmp-00", "tokenizer.json.tmp-mine"]
    swept = [f"{name}.tmp-0123abcd" for name in half]
    swept += ["lock.json.takeover", "checkpoints/best.json.tmp-00ff"]
    for name in (*kept, *swept):
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in sweep(tmp_path)} == set(swept)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "checkpoints"])
