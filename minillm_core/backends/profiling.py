"""Where a step's time and memory go: asked while benching alone, and never by a training run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from minillm_core.backends.base import Batch, Trainer

__all__ = ["Profiler", "profiler_of"]


class Profiler(ABC):
    """Looks into the steps of one trainer."""

    notes: tuple[str, ...] = ()
    """What the framework does not tell, in words."""

    @abstractmethod
    def check(self, *, layers: bool, trace: bool) -> None:
        """Refuse what the framework cannot tell, before anything is timed.

        Raises:
            BackendError: it cannot.
        """

    @abstractmethod
    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Part of one step -> its seconds, as far as the framework tells them apart. Waits.

        The arguments are those of :meth:`~minillm_core.backends.base.Trainer.step`.
        """

    @abstractmethod
    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """Layer -> seconds of its forward and its backward pass in one eager step. Waits.

        Raises:
            BackendError: the framework cannot tell.
        """

    @abstractmethod
    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """Write what ``step`` does, as Chrome's trace format, which Perfetto opens.

        Args:
            path: the file.
            step: runs some steps of the trainer and reads them. Where the trainer is not compiled,
                there is a range for every module, under its path in the plan.

        Raises:
            BackendError: the framework cannot.
        """

    @abstractmethod
    def held_bytes(self) -> int | None:
        """Allocated on the device now; None where nobody counts."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what is cached and not in use: another trainer may need it."""

    @abstractmethod
    def forget_peak(self) -> None:
        """The peak is from now on."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """The most that was allocated on the device since; None where nobody counts."""


_MADE = {
    "torch": "minillm_core.backends.torch.profiling:TorchProfiler",
    "mlx": "minillm_core.backends.mlx.profiling:MLXProfiler",
}


def profiler_of(trainer: Trainer) -> Profiler:
    """The profiler for a trainer's framework."""
    module, _, name = _MADE[trainer.binding.backend].partition(":")
    return getattr(import_module(module), name)(trainer)
