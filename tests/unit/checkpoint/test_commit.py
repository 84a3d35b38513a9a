"""Tests that a checkpoint is complete or absent, at whatever point its writer dies."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from minillm_core import disk
from minillm_core.checkpoint.commit import commit, discard, retain, sweep
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import newest, newest_or_refuse
from minillm_core.errors import Interrupted, MinillmError, NoCheckpoint, NonFinite, Refusal

STATE = {
    "model.w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "optimizer.adamw.m.w": np.full((3, 4), 0.5, np.float32),
    "state.count": np.asarray(7, np.int32),
}

PRINTABLE = st.characters(codec="utf-8").filter(str.isprintable)


class Killed(BaseException):
    """A replacement of SIGKILL: no handler of the tested code may run."""


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch):
    """Return a function that kills at the n-th disk access: before it, within a write, or after it."""

    def arm(n: int, when: str, error: BaseException) -> list[str]:
        touched: list[str] = []

        def wrap(name: str):
            real = getattr(disk, name)

            def touch(path: Path, *rest):
                touched.append(f"{name} {path.name}")
                here = len(touched) == n + 1
                if here and isinstance(error, Killed):
                    # a killed process runs no clean-up handlers
                    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
                if here and when == "before":
                    raise error
                if here and when == "half" and name in ("stream", "write"):
                    whole = b"".join(map(bytes, rest[0]) if name == "stream" else rest)
                    path.write_bytes(whole[: len(whole) // 2])
                    raise error
                result = real(path, *rest)
                if here:
                    raise error
                return result

            return touch

        for name in ("stream", "write", "sync", "rename"):
            monkeypatch.setattr(disk, name, wrap(name))
        return touched

    return arm


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    state=st.dictionaries(
        st.sampled_from(["model.", "optimizer.muon.m.", "state."]).flatmap(
            lambda head: st.text(PRINTABLE, min_size=1, max_size=6).map(head.__add__)
        ),
        st.sampled_from([np.float32, np.int32, np.int64, np.uint8]).flatmap(
            lambda dtype: arrays(
                dtype,
                array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
                elements={"allow_nan": False, "allow_infinity": False}
                if dtype is np.float32
                else None,
            )
        ),
        max_size=5,
    ),
    scalars=st.dictionaries(st.text(max_size=4), st.integers() | st.booleans() | st.none()),
)
def test_what_is_committed_is_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, state: dict, scalars: dict
) -> None:
    out = tmp_path_factory.mktemp("out")
    commit(out, 3, state, scalars)
    found = newest(out)
    assert found is not None
    back = found.arrays()
    assert back.keys() == state.keys()
    for name, array in state.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()
    assert found.scalars == scalars
    assert all(name.startswith("model.") for name in found.arrays("model."))


def test_strides_do_not_matter(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"model.t": whole.T, "model.skip": whole[::2, ::3], "model.back": whole[::-1]}
    commit(tmp_path, 1, views, {})
    found = newest_or_refuse(tmp_path).arrays()
    for name, view in views.items():
        np.testing.assert_array_equal(found[name], view)


def test_files_and_names(tmp_path: Path) -> None:
    path = commit(tmp_path, 100, STATE, {"tokens": 5})
    assert path == tmp_path / "checkpoints" / "step-00000100"
    assert sorted(each.name for each in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert newest_or_refuse(tmp_path).arrays("model.").keys() == {"model.w"}


def test_the_manifest_is_written_last_and_the_rename_follows(tmp_path: Path, die_at) -> None:
    touched = die_at(-1, "", Killed())
    commit(tmp_path, 1, STATE, {})
    names = [line.split()[0] for line in touched]
    assert [line for line in touched if line.startswith(("write", "stream"))] == [
        "stream model.safetensors",
        "stream optimizer.safetensors",
        "stream state.json",
        "write manifest.json",
    ]
    assert names[-2:] == ["rename", "sync"]
    assert touched[-1] == "sync checkpoints"
    assert touched[-3].startswith("sync step-00000001.tmp-")


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("n", range(12))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, die_at, monkeypatch: pytest.MonkeyPatch, n: int, when: str
) -> None:
    commit(tmp_path, 1, STATE, {"tokens": 1})
    changed = {**STATE, "model.w": STATE["model.w"] + 1}
    touched = die_at(n, when, Killed())
    try:
        commit(tmp_path, 2, changed, {"tokens": 2})
    except Killed:
        pass
    else:
        assert n >= len(touched)
    monkeypatch.undo()

    found = newest_or_refuse(tmp_path)
    assert found.step in (1, 2)
    assert found.scalars == {"tokens": found.step}
    expected = changed if found.step == 2 else STATE
    np.testing.assert_array_equal(found.arrays()["model.w"], expected["model.w"])

    sweep(tmp_path)
    assert not list(tmp_path.glob("checkpoints/*.tmp-*"))
    if found.step == 1:
        commit(tmp_path, 2, changed, {"tokens": 2})
    assert newest_or_refuse(tmp_path).step == 2


@pytest.mark.parametrize("n", range(6))
def test_a_full_disk_leaves_nothing_behind_and_says_how_much_was_needed(
    tmp_path: Path, die_at, n: int
) -> None:
    commit(tmp_path, 1, STATE, {})
    die_at(n, "half", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        MinillmError, match=r"(?s)step 2 .*not be written.* MB are needed, .* MB are free"
    ) as error:
        commit(tmp_path, 2, STATE, {})
    assert error.value.exit_code == 1
    assert "No space left" in str(error.value)
    assert "make room" in str(error.value)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left[0] == "step-00000001"
    assert not any(".tmp-" in name for name in left)


def test_an_error_that_is_not_of_a_full_disk_asks_for_no_room(tmp_path: Path, die_at) -> None:
    die_at(2, "half", OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(MinillmError, match="remove the cause and --resume") as error:
        commit(tmp_path, 2, STATE, {})
    assert "make room" not in str(error.value)


def test_a_disk_that_takes_no_more_is_survived(tmp_path: Path) -> None:
    """Here the kernel refuses, in the middle of a file."""
    commit(tmp_path, 1, STATE, {})
    large = {"model.w": np.zeros(1 << 18, np.float32)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(MinillmError, match="File too large"):
            commit(tmp_path, 2, large, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    commit(tmp_path, 2, large, {})
    assert newest_or_refuse(tmp_path).step == 2


def test_who_may_read_is_what_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = commit(tmp_path, 1, STATE, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o750
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o640}


def test_a_step_that_is_there_is_replaced_and_not_merged(tmp_path: Path) -> None:
    path = commit(tmp_path, 1, STATE, {"first": True})
    (path / "stale").write_bytes(b"")
    commit(tmp_path, 1, {"model.w": STATE["model.w"] + 1}, {"first": False})
    found = newest_or_refuse(tmp_path)
    assert found.scalars == {"first": False}
    assert found.arrays().keys() == {"model.w"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert not (path / "stale").exists()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("n", range(12))
def test_a_kill_while_replacing_the_only_one_leaves_one(
    tmp_path: Path, die_at, monkeypatch: pytest.MonkeyPatch, n: int, when: str
) -> None:
    commit(tmp_path, 1, STATE, {"first": True})
    die_at(n, when, Killed())
    with suppress(Killed):
        commit(tmp_path, 1, STATE, {"first": False})
    monkeypatch.undo()
    sweep(tmp_path)
    assert newest_or_refuse(tmp_path).scalars["first"] in (True, False)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_full_disk_while_replacing_leaves_the_old_one(tmp_path: Path, die_at) -> None:
    commit(tmp_path, 1, STATE, {"first": True})
    touched = die_at(7, "before", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(MinillmError):
        commit(tmp_path, 1, STATE, {"first": False})
    assert [line.split()[0] for line in touched].count("rename") == 2
    assert newest_or_refuse(tmp_path).scalars == {"first": True}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_an_abandoned_line_is_discarded(tmp_path: Path) -> None:
    paths = {step: commit(tmp_path, step, STATE, {}) for step in (1, 5, 6, 100)}
    assert discard(tmp_path, after=5) == [paths[100], paths[6]]
    assert discard(tmp_path, after=5) == []
    assert newest_or_refuse(tmp_path).step == 5


@pytest.mark.parametrize("remove", [lambda out: retain(out, 1), lambda out: discard(out, 1)])
def test_a_kill_after_the_first_file_was_removed_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove
) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step, STATE, {})

    def die(path: Path) -> None:
        (path / "model.safetensors").unlink()
        raise Killed

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(shutil, "rmtree", die)
        remove(tmp_path)
    committed = list((tmp_path / "checkpoints").glob("step-????????"))
    assert len(committed) == 2
    assert not any(verify(path) for path in committed)
    assert len(sweep(tmp_path)) == 1


@pytest.mark.parametrize("n", range(4))
def test_a_kill_while_discarding_leaves_nothing_half(
    tmp_path: Path, die_at, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step, STATE, {})
    die_at(n, "after", Killed())
    with suppress(Killed):
        discard(tmp_path, after=1)
    monkeypatch.undo()
    sweep(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        assert not verify(path)
    discard(tmp_path, after=1)
    assert newest_or_refuse(tmp_path).step == 1


@pytest.mark.parametrize("after", range(6))
def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path, after: int) -> None:
    asked: list[None] = []

    def given_up() -> bool:
        asked.append(None)
        return len(asked) > after

    with pytest.raises(Interrupted, match="step 1 was abandoned"):
        commit(tmp_path, 1, STATE, {}, given_up=given_up)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.w", "optimizer.adamw.m.w"])
def test_what_is_not_finite_is_never_saved(tmp_path: Path, name: str, value: float) -> None:
    bad = STATE[name].copy()
    bad[1, 2] = value
    with pytest.raises(NonFinite, match="step 4"):
        commit(tmp_path, 4, {**STATE, name: bad}, {})
    assert not (tmp_path / "checkpoints").exists()


def test_what_json_cannot_hold_is_a_defect_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        commit(tmp_path, 1, STATE, {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_sweeping_takes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    kept = commit(tmp_path, 1, STATE, {})
    folder = kept.parent
    (folder / "step-00000002.tmp-0a1b").mkdir()
    (folder / "step-00000002.tmp-0a1b" / "model.safetensors").write_bytes(b"half")
    (folder / "step-00000003.tmp-ff").symlink_to(kept)
    (folder / "notes.tmp-1").mkdir()
    (folder / "step-00000004.corrupt").mkdir()
    for name in ("run.json", "run.json.tmp-01ab23cd", "metrics.jsonl.tmp-45", "mine.tmp-1"):
        (tmp_path / name).touch()
    assert [path.name for path in sweep(tmp_path)] == [
        "step-00000002.tmp-0a1b",
        "step-00000003.tmp-ff",
        "metrics.jsonl.tmp-45",
        "run.json.tmp-01ab23cd",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints",
        "mine.tmp-1",
        "run.json",
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        "notes.tmp-1",
        "step-00000001",
        "step-00000004.corrupt",
    ]
    assert newest_or_refuse(tmp_path).step == 1
    assert sweep(tmp_path / "nowhere") == []


def test_newest_orders_steps_as_numbers_and_knows_only_its_own_names(tmp_path: Path) -> None:
    for step in (9, 100_000_000, 99_999_999):
        commit(tmp_path, step, STATE, {"step": step})
    folder = tmp_path / "checkpoints"
    (folder / "step-000000200000000").mkdir()  # a name that we never write
    (folder / "step-00000300.corrupt").mkdir()
    assert newest_or_refuse(tmp_path).step == 100_000_000


def test_no_checkpoint_and_no_whole_one_are_told_apart(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    with pytest.raises(Refusal, match="no checkpoint"):
        newest_or_refuse(tmp_path)
    for step in (1, 2):
        path = commit(tmp_path, step, STATE, {})
        (path / "state.json").write_bytes(b"[]")
    assert newest(tmp_path) is None
    with pytest.raises(NoCheckpoint, match=r"none of the 2 .*state\.json"):
        newest_or_refuse(tmp_path)


def test_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    commit(tmp_path, 1, STATE, {})
    assert newest_or_refuse(tmp_path).arrays().keys() == STATE.keys()


def test_replace_is_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    disk.replace(path, b"old")
    disk.replace(path, b"new")
    assert path.read_bytes() == b"new"

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(OSError, match="No space"):
        disk.replace(path, b"newer")
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    assert path.read_bytes() == b"new"


def test_the_newest_that_verify_are_kept(tmp_path: Path) -> None:
    paths = {step: commit(tmp_path, step, STATE, {}) for step in range(1, 7)}
    assert retain(tmp_path, 6) == retain(tmp_path, 7) == []
    (paths[5] / "model.safetensors").write_bytes(b"")
    assert retain(tmp_path, 3) == [paths[2], paths[1]]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [paths[step].name for step in (3, 4, 5, 6)]
    for step in (3, 4, 6):
        (paths[step] / "model.safetensors").write_bytes(b"")
    assert retain(tmp_path, 1) == []  # nothing verifies: nothing is deleted


def test_what_is_spared_stays_beside_the_newest(tmp_path: Path) -> None:
    paths = {step: commit(tmp_path, step, STATE, {}) for step in range(1, 6)}
    (tmp_path / "checkpoints" / "best.json.tmp-0123456789abcdef").write_text("{")
    assert retain(tmp_path, 2, spare={2, 99}) == [paths[3], paths[1]]
    assert [path.name for path in sweep(tmp_path)] == ["best.json.tmp-0123456789abcdef"]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("n", range(5))
def test_a_kill_while_removing_leaves_the_newest(
    tmp_path: Path, die_at, monkeypatch: pytest.MonkeyPatch, n: int, keep: int
) -> None:
    for step in range(1, 5):
        commit(tmp_path, step, STATE, {"step": step})
    die_at(n, "after", Killed())
    with suppress(Killed):
        retain(tmp_path, keep)
    monkeypatch.undo()
    assert newest_or_refuse(tmp_path).step == 4
    sweep(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        assert not verify(path)
    retain(tmp_path, keep)
    assert len(list((tmp_path / "checkpoints").iterdir())) == keep
