"""Profiling of a step's time and memory: what frameworks can tell, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from minillm_core.studies import Batch, Trainer


class Profiler(Protocol):
    """A look into the steps of one trainer."""

    notes: tuple[str, ...]
    """Sentences about figures that the framework does not have."""

    def check(self, *, layers: bool, trace: bool) -> None:
        """Refuse figures that the framework does not have, before anything is timed.

        Raises:
            BackendError: it cannot.
        """

    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Time the parts of one step: part -> seconds, as far as the framework tells them apart. Waits.

        The arguments are those of :meth:`~minillm_core.studies.Trainer.step`.
        """

    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """Time the layers of one eager step: layer -> seconds of its forward and backward pass. Waits.

        Raises:
            BackendError: the framework cannot tell.
        """

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """Write a trace of ``step``, as Chrome's trace format, which Perfetto opens.

        Args:
            path: the file.
            step: runs some steps of the trainer and reads them. Where the trainer is not compiled,
                there is a range for every module, under its path in the plan.

        Raises:
            BackendError: the framework cannot.
        """

    def memory_bytes(self) -> int:
        """Count the bytes that the device has, or that this process may use of them."""
        ...

    def held_bytes(self) -> int | None:
        """Count the bytes allocated on the device now; None where the framework does not count."""

    def trim(self) -> None:
        """Free cached memory that is not in use: another trainer may need it."""

    def forget_peak(self) -> None:
        """Begin a new peak."""

    def peak_bytes(self) -> int | None:
        """Count the most bytes allocated on the device since; None where the framework does not count.

        Where ``held_bytes`` is None it is the whole process's, if anything, since that started.
        """


_MADE = {
    "torch": "minillm_lab.profiling_torch:TorchProfiler",
    "mlx": "minillm_lab.profiling_mlx:MLXProfiler",
}


def profiler_of(trainer: Trainer) -> Profiler:
    """Make the profiler for a trainer's framework."""
    module, _, name = _MADE[trainer.binding.backend].partition(":")
    return getattr(import_module(module), name)(trainer)
