"""Checkpoints that several ranks write in parallel: here threads that share a store and a folder."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistNetworkError, HashStore  # pyright: ignore[reportPrivateImportUsage]

import minillm_core as minillm
from minillm_core import disk
from minillm_core.backends.base import Snapshot
from minillm_core.checkpoint import layout
from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import newest
from minillm_core.checkpoint.tensors import ROW, joined
from minillm_core.checkpoint.writer import CheckpointWriter, Result
from minillm_mesh.layout import Part
from minillm_mesh.part_writer import NOW, PartWriter
from minillm_mesh.torch_share import ShardedArrays

Arrays = dict[str, np.ndarray]
WHOLE: Arrays = {
    "model.w": np.arange(12, dtype=np.float32).reshape(6, 2),
    "model.v": np.ones(3, np.float32),
    "optimizer.precondition.m.w": -np.arange(12, dtype=np.float32).reshape(6, 2),
    "optimizer.updates": np.array(7, np.float32),
}
PARTS: Sequence[Arrays] = (
    {
        f"model.w{ROW}0": WHOLE["model.w"][:2],
        f"optimizer.precondition.m.w{ROW}0": WHOLE["optimizer.precondition.m.w"][:2],
        "optimizer.updates": WHOLE["optimizer.updates"],
    },
    {f"model.w{ROW}2": WHOLE["model.w"][2:5], "model.v": WHOLE["model.v"]},
    {
        f"model.w{ROW}5": WHOLE["model.w"][5:],
        f"optimizer.precondition.m.w{ROW}2": WHOLE["optimizer.precondition.m.w"][2:],
    },
)


class Ranks:
    """Three ranks' parts of the checkpoints of one run."""

    def __init__(self, out: Path) -> None:
        store = HashStore()
        self.out = out
        self.saves = [PartWriter(store, rank, 3) for rank in range(3)]
        self.writer = CheckpointWriter(out, keep=2)

    def begin(self, step: int, parts: Sequence[Callable[[], Mapping[str, np.ndarray]]]) -> None:
        """Take a snapshot on all ranks, and start the write on rank 0."""
        taken = [
            each.add(Snapshot(lambda part=part: dict(part())))
            for each, part in zip(self.saves, parts, strict=True)
        ]
        self.writer.submit(step, taken[0], {"step": step}, taken[0].beside)

    def save(self, step: int, *parts: Mapping[str, np.ndarray]) -> Result:
        """Save, and wait for the result."""
        self.begin(step, [lambda part=part: part for part in parts or PARTS])
        return self.writer.wait()[-1]

    def close(self) -> None:
        """End all ranks."""
        self.writer.close()
        for each in self.saves:
            each.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Ranks of a run in ``tmp_path``."""
    made = Ranks(tmp_path)
    yield made
    made.close()


def entries(out: Path) -> set[str]:
    """List the entries of the folder of checkpoints."""
    return {path.name for path in (out / "checkpoints").iterdir()}


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> bool:
    """Return whether arrays are bit-identical."""
    return found.keys() == wanted.keys() and all(
        array.dtype == wanted[name].dtype and np.array_equal(array, wanted[name])
        for name, array in found.items()
    )


def test_what_ranks_write_reads_as_what_one_process_writes(ranks: Ranks, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert ranks.save(step).error is None
    (tmp_path / "alone").mkdir()
    path = commit(tmp_path / "alone", 3, WHOLE, {"step": 3})
    theirs, alone = newest(tmp_path), newest(tmp_path / "alone")
    assert theirs is not None
    assert alone is not None
    assert same(theirs.arrays(), alone.arrays())
    assert same(theirs.arrays("model."), alone.arrays("model."))
    assert theirs.scalars == alone.scalars
    assert {one.name for one in theirs.path.iterdir()} - {one.name for one in path.iterdir()} == {
        "rank-00001.safetensors",
        "rank-00002.safetensors",
    }
    assert entries(tmp_path) == {
        "step-00000002",
        "step-00000003",
    }  # keep=2, and nothing is left over


def refuse(error: Exception) -> Callable[[], Arrays]:
    """Return a snapshot function that fails to copy to the host."""

    def to_host() -> Arrays:
        raise error

    return to_host


def test_a_disk_that_is_full_for_one_rank_leaves_the_checkpoints_before(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.save(1).path is not None
    whole = disk.stream

    def full(path: Path, parts: Iterator[disk.Buffer]) -> disk.Written:
        if path.name == "rank-00002.safetensors":
            next(iter(parts))
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return whole(path, parts)

    monkeypatch.setattr("minillm_mesh.part_writer.stream_file", full)
    result = ranks.save(2)
    assert result.path is None
    assert "rank 2: [Errno 28] No space left on device" in str(result.error)
    assert "earlier ones are intact" in str(result.error)
    assert entries(tmp_path) == {"step-00000001"}
    monkeypatch.undo()
    assert ranks.save(3).path is not None  # checkpoint.on_error=continue trains on


def test_what_is_not_finite_on_one_rank_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    bad = {**PARTS[1], "model.v": np.array([1, np.nan, 3], np.float32)}
    error = ranks.save(1, PARTS[0], bad, PARTS[2]).error
    assert isinstance(error, minillm.NonFinite)
    assert "rank 1: model.v is no longer finite" in str(error)
    assert entries(tmp_path) == set()
    # rank 0 finds it before the save is announced: the other ranks skip their part
    first = {**PARTS[0], "optimizer.updates": np.array(np.inf, np.float32)}
    assert isinstance(ranks.save(2, first, *PARTS[1:]).error, minillm.NonFinite)
    assert ranks.save(3).path is not None


def test_an_error_of_one_rank_is_said_with_its_number(ranks: Ranks, tmp_path: Path) -> None:
    ranks.begin(1, [lambda: PARTS[0], refuse(MemoryError()), lambda: PARTS[2]])
    assert "rank 1: MemoryError" in str(ranks.writer.wait()[-1].error)
    ranks.begin(2, [refuse(MemoryError()), lambda: PARTS[1], lambda: PARTS[2]])
    assert isinstance(ranks.writer.wait()[-1].error, MemoryError)
    assert ranks.save(3).path is not None
    assert entries(tmp_path) == {"step-00000003"}


def test_what_rank_0_cannot_write_the_others_stop_writing(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, begun = disk.stream, threading.Event()

    def slow(path: Path, parts: Iterator[disk.Buffer]) -> disk.Written:
        def slowly() -> Iterator[disk.Buffer]:
            for part in parts:
                begun.set()
                time.sleep(0.2)
                yield part

        return whole(path, slowly())

    def full(path: Path, parts: Iterator[disk.Buffer]) -> disk.Written:
        assert begun.wait(30)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minillm_mesh.part_writer.stream_file", slow)
    monkeypatch.setattr(disk, "stream", full)
    result = ranks.save(1)
    assert "could not be written: [Errno 28] No space left on device" in str(result.error)
    assert entries(tmp_path) == set()


class Lost:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("how", ["given up", "lost", "store lost"])
def test_a_part_that_never_comes_is_not_waited_for(ranks: Ranks, tmp_path: Path, how: str) -> None:
    go = threading.Event()

    def held() -> Arrays:
        assert go.wait(30)
        return PARTS[1]

    ranks.begin(1, [lambda: PARTS[0], held, lambda: PARTS[2]])
    time.sleep(0.1)
    if how == "lost":
        ranks.saves[0].give_up()
    elif how == "store lost":
        lost: Any = Lost()
        ranks.saves[0]._store = lost
    else:
        ranks.writer.close(now=True)
        threading.Timer(0.3, go.set).start()
    (result,) = ranks.writer.wait()
    go.set()
    assert isinstance(
        result.error, minillm.Interrupted if how == "given up" else minillm.MinillmError
    )
    if how != "given up":  # the disk is not blamed
        assert "step 1 could not be written: another process of the run has ended" in str(
            result.error
        )
        assert "--resume continues" in str(result.error)
        assert not re.search("MB are|make room", str(result.error))
    ranks.close()
    assert newest(tmp_path) is None


def test_a_rank_that_ends_leaves_a_save_that_rank_0_has_not_begun(tmp_path: Path) -> None:
    """It says so: rank 0 may still copy its own arrays, and would wait for a part that never comes."""
    store = HashStore()
    first, second = (PartWriter(store, rank, 2) for rank in range(2))
    taken = first.add(Snapshot(lambda: dict(PARTS[0])))
    second.add(Snapshot(refuse(AssertionError("a part of a save that rank 0 has not begun"))))
    second.close()
    with pytest.raises(minillm.MinillmError, match="rank 1: the process ended before rank 0 began"):
        commit(tmp_path, 1, taken(), {"step": 1}, beside=taken.beside)
    assert entries(tmp_path) == set()
    first.close()


def test_nothing_is_written_of_a_save_that_was_given_up_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the folder that a file without one would be written to
    store = HashStore()
    first, second = (PartWriter(store, rank, 2) for rank in range(2))
    store.set(NOW, json.dumps([1, ""]))
    second.add(Snapshot(lambda: dict(PARTS[1])))
    assert json.loads(store.get("1/1"))[1] == "rank 0 has abandoned it"
    second.close()
    first.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda f: (f / "rank-00002.safetensors").unlink(),
            "'rank-00002.safetensors' is not a file of",
        ),
        (
            lambda f: (f / "rank-00003.safetensors").write_bytes(b"x"),
            "lists rank-00003.safetensors 0",
        ),
        (lambda f: (f / "rank-00001.safetensors").write_bytes(b"x"), "1 bytes, "),
        (
            lambda f: (f / "rank-00001.safetensors").write_bytes(
                (f / "rank-00001.safetensors").read_bytes()[:-1] + b"\x7f"
            ),
            "its content changed",
        ),
    ],
)
def test_every_rank_s_file_is_verified(
    ranks: Ranks, change: Callable[[Path], object], reason: str
) -> None:
    path = ranks.save(1).path
    assert path is not None
    assert verify(path) == []
    change(path)
    assert reason in verify(path)[0]


def test_rows_that_are_missing_or_there_twice_are_refused() -> None:
    for bad in (
        {f"w{ROW}1": np.zeros(2)},
        {f"w{ROW}0": np.zeros(2), f"w{ROW}3": np.zeros(1)},
        {f"w{ROW}0": np.zeros(2), f"w{ROW}1": np.zeros(2)},
        {f"w{ROW}0": np.zeros(2), "w": np.zeros(2)},
    ):
        with pytest.raises(ValueError, match="w: its parts begin at rows"):
            joined(bad)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_cut_in_any_order_is_put_together(lengths: list[int], shuffled: object) -> None:
    whole = np.random.default_rng(0).normal(size=(sum(lengths), 3)).astype(np.float32)
    begins = [sum(lengths[:n]) for n in range(len(lengths))]
    parts = [(f"a{ROW}{b}", whole[b : b + n]) for b, n in zip(begins, lengths, strict=True)]
    shuffled.shuffle(parts)  # type: ignore[attr-defined]
    found = joined({**dict(parts), "b@": whole, "@7": whole, "c@d": whole})
    assert same(found, {"a": whole, "b@": whole, "@7": whole, "c@d": whole})
    for first in range(len(whole) + 1):
        for last in range(first, len(whole) + 1):
            assert np.array_equal(found["a"][first:last], whole[first:last])


def test_a_rank_takes_its_rows_of_arrays_of_the_right_shape_alone() -> None:
    share: Any = SimpleNamespace(
        mine={"model.w": Part("w", (2, 2), 4)},
        shapes={"w": (6, 2)},
        known={"model.w": ((6, 2), torch.float32)},
    )
    whole = WHOLE["model.w"]
    assert np.array_equal(ShardedArrays.part(share, "model.w", whole), whole[4:])
    assert ShardedArrays.part(share, "state.s", whole) is whole
    for other in (whole[:5], np.concatenate([whole, whole])):  # with this rank's rows
        with pytest.raises(ValueError, match=r"model\.w: shape"):
            ShardedArrays.part(share, "model.w", other)


def test_a_rank_writes_its_parts_and_rank_0_what_is_not_divided(tmp_path: Path) -> None:
    store, written = HashStore(), []
    tensors = {"model.w": torch.ones(2, 2), "model.v": torch.zeros(3), "state.s": torch.zeros(1)}
    mine = {"model.w": Part("w", (2, 2), 4), "model.v": Part("v", (3,))}
    for rank in range(2):
        share: Any = SimpleNamespace(mine=mine, rank=rank, saves=PartWriter(store, rank, 2))
        ShardedArrays.snapshot(
            share, tensors, lambda named: written.append(named) or Snapshot(dict)
        )
        share.saves.close()
    assert written[0].keys() == {f"model.w{ROW}4", "model.v", "state.s"}
    assert written[1].keys() == {f"model.w{ROW}4", "model.v"}
    assert layout.OF_RANK.fullmatch(layout.of_rank(123456))
