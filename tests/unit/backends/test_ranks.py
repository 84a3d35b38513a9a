"""Tests of ``minillm train --gpus N``: started processes, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core.backends import ranks
from minillm_core.backends.detect import Detected, Machine
from minillm_core.errors import BackendError, ConfigError

CUDA = Detected("torch", "cuda", "named")


class Launches:
    """Ranks whose launcher records its calls."""

    started: tuple[int, tuple[str, ...]] | None = None

    @classmethod
    def launch(cls, gpus: int, arguments: tuple[str, ...]) -> int:
        cls.started = gpus, arguments
        return 3


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``launch(gpus, size=, rank=)`` on a machine of two GPUs: the exit code, and the launcher's calls."""

    def call(gpus: int, *, size: int | None = None, detected: Detected = CUDA) -> Any:
        if size is not None:
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setattr(Launches, "started", None)
        return ranks.launch(detected, gpus, ("train",)), Launches.started

    monkeypatch.setattr(ranks, "probe", lambda: Machine(nvidia=2))
    monkeypatch.setattr(ranks, "engine", lambda backend: Launches)
    return call


def test_a_process_for_each_gpu(launch: Any) -> None:
    assert launch(2) == (3, (2, ("train",)))


@pytest.mark.parametrize(("gpus", "size"), [(1, None), (1, 1), (2, 2)])
def test_what_runs_in_this_process_starts_no_other(launch: Any, gpus: int, size: int) -> None:
    """This includes every process started by the launcher: it has the same arguments."""
    assert launch(gpus, size=size) == (None, None)


@pytest.mark.parametrize(
    ("gpus", "size", "device", "said"),
    [
        (3, None, "cuda", "--gpus 3 asks for NVIDIA GPUs, and 2 can be used"),
        (1, None, "cpu", "--gpus 1 asks for NVIDIA GPUs"),
        (1, 2, "cuda", "--gpus 1 in one of 2 processes"),
    ],
)
def test_other_numbers_are_refused(
    launch: Any, gpus: int, size: int | None, device: str, said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        launch(gpus, size=size, detected=Detected("torch", device, "named"))


class Some(ranks.Ranks):
    """Two processes that can divide updates, or cannot."""

    size = 2

    def __init__(self, unsharded_reason: str) -> None:
        self.unsharded_reason = unsharded_reason


@pytest.mark.parametrize(
    ("asked", "here", "divided"),
    [
        ("auto", ranks.ALONE, ""),
        ("auto", Some(""), "updates"),
        ("updates", Some(""), "updates"),
        ("weights", Some(""), "weights"),
        ("off", Some(""), ""),
        ("auto", Some("they cannot"), ""),
        ("off", ranks.ALONE, ""),
    ],
)
def test_updates_are_divided_where_they_can_be(asked: str, here: ranks.Ranks, divided: str) -> None:
    assert ranks.divides(asked, here) == divided


@pytest.mark.parametrize("asked", ["updates", "weights"])
@pytest.mark.parametrize(
    ("here", "why"), [(ranks.ALONE, "one process trains"), (Some("they cannot"), "they cannot")]
)
def test_what_cannot_be_divided_is_refused(asked: str, here: ranks.Ranks, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{asked} cannot be divided: {why}") as caught:
        ranks.divides(asked, here)
    assert caught.value.where == f"mesh.shard={asked}"
    assert "mesh.shard=auto" in (caught.value.fix or "")
