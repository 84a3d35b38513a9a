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
        (3, None, "cuda", "--gpus 3 needs NVIDIA GPUs: 2 found"),
        (1, None, "cpu", "--gpus 1 needs NVIDIA GPUs"),
        (1, 2, "cuda", "--gpus 1 in one of 2 processes"),
    ],
)
def test_other_numbers_are_refused(
    launch: Any, gpus: int, size: int | None, device: str, said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        launch(gpus, size=size, detected=Detected("torch", device, "named"))


NAMES = ("RANK", "WORLD_SIZE", "MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "MLX_IBV_DEVICES")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ("", (0, 1)),
        ("RANK=1 WORLD_SIZE=2", (1, 2)),
        ("MLX_RANK=1 MLX_WORLD_SIZE=4", (1, 4)),
        ("RANK=0 WORLD_SIZE=2 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1", (0, 2)),  # srun torchrun
        ("SLURM_NTASKS=8", (0, 1)),  # a shell of salloc
        ("SLURM_NTASKS=8 SLURM_PROCID=0", (0, 1)),  # a batch script
        ("SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", (0, 1)),  # srun -n 1
        ("WORLD_SIZE=1", (0, 1)),
        ("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8", "SLURM_STEP_NUM_TASKS=8"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2"),
        ("MLX_RANK=0", "MLX_RANK=0"),
        ("RANK=1", "RANK=1"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2"),
        ("RANK=first WORLD_SIZE=2", "RANK=first, WORLD_SIZE=2"),
    ],
)
def test_one_of_several_processes_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, variables: str, found: Any
) -> None:
    for name in (*NAMES, *ranks.TASKS):
        monkeypatch.delenv(name, raising=False)
    for one in variables.split():
        monkeypatch.setenv(*one.split("="))
    if isinstance(found, tuple):
        assert ranks.launched() == found
        return
    with pytest.raises(BackendError, match="would train alone") as caught:
        ranks.launched()
    assert caught.value.where == found
    assert "srun torchrun" in (caught.value.fix or "")
    assert ranks.rank_prefix() == ""


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
