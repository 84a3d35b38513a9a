"""Profiling of a step's time and memory: one interface for all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from minillm_core.studies import Batch, Trainer


class Profiler(Protocol):
    """A profiler of one trainer's steps."""

    notes: tuple[str, ...]
    """Notes on measurements that the framework does not support."""

    @staticmethod
    def check(*, layers: bool, trace: bool) -> None:
        """Check that the framework supports the requested measurements, before a trainer is built.

        Raises:
            BackendError: it does not.
        """

    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Time the parts of one step: part -> seconds, as far as the framework separates them. Synchronises.

        Takes the arguments of :meth:`~minillm_core.studies.Trainer.step`.
        """

    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """Time the layers of one eager step: layer -> seconds of its forward and backward pass. Synchronises.

        Raises:
            BackendError: the framework does not support it.
        """

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """Write a trace of ``step`` in Chrome's trace format, which Perfetto opens.

        Args:
            path: the file.
            step: runs some steps of the trainer and reads their results. If the trainer is not compiled,
                the trace has a range for every module, named by its path in the plan.

        Raises:
            BackendError: the framework does not support it.
        """

    def memory_bytes(self) -> int:
        """Return the bytes of device memory, or the part that this process may use."""
        ...

    def held_bytes(self) -> int | None:
        """Return the bytes currently allocated on the device; None if the framework does not count them."""

    def trim(self) -> None:
        """Free unused cached memory, which another trainer may need."""

    def forget_peak(self) -> None:
        """Reset the peak memory statistics."""

    def peak_bytes(self) -> int | None:
        """Return the peak bytes allocated on the device since the reset; None if they are not counted.

        Where ``held_bytes`` is None, a peak is the whole process's since its start.
        """


_MADE = {
    "torch": "minillm_lab.profiling_torch:TorchProfiler",
    "mlx": "minillm_lab.profiling_mlx:MLXProfiler",
}


def profiler_class(backend: str) -> type[Profiler]:
    """Return the class of a framework's profilers; imports the framework."""
    module, _, name = _MADE[backend].partition(":")
    return getattr(import_module(module), name)


def profiler_of(trainer: Trainer) -> Profiler:
    """Return the profiler for a trainer's framework."""
    made: Any = profiler_class(trainer.binding.backend)  # a protocol has no constructor
    return made(trainer)
