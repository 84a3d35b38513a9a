"""A step's time on MLX: gradients and update, evaluated as two graphs; MLX offers no finer timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from minillm_core import BackendError
from minillm_core.inspection import memory
from minillm_core.studies import Batch, Trainer


class MLXProfiler:
    """A profiler of one trainer's steps."""

    notes = (
        "mlx makes forward and backward pass one graph: 'gradients' is both, and gradients and "
        "update were timed as two graphs, where a step of one micro-batch is one",
    )

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @staticmethod
    def check(*, layers: bool, trace: bool) -> None:
        """Raise for layers and for traces: MLX supports neither."""
        if layers:
            raise _no_layers()
        if trace:
            raise _no_trace()

    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Time the gradients and the update; the trainer's state is unchanged afterwards."""
        trainer, before = self.trainer, self.trainer.arrays()
        moments: list[tuple[str, float]] = []

        def note(part: str) -> None:
            mx.synchronize()
            moments.append((part, time.perf_counter()))

        trainer.step_timer = note
        try:
            for _ in range(2):  # the first compiles both graphs
                moments.clear()
                trainer.read(trainer.step(micro, values, supervised))
        finally:
            trainer.step_timer = None
            trainer.resume(before)
        found: dict[str, float] = {}
        for (part, began), (_, ended) in pairwise(moments):
            found[part] = found.get(part, 0.0) + ended - began
        return found

    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """Raise: MLX has no layer timings."""
        raise _no_layers()

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """Raise: MLX has no trace format that Perfetto opens."""
        raise _no_trace()

    def memory_bytes(self) -> int:
        """Return Metal's recommended maximum, or a GPU's bytes; on a CPU the container's or the machine's."""
        if mx.default_device() == mx.Device(mx.cpu):
            return memory()
        about = mx.device_info()
        found = about.get("max_recommended_working_set_size") or about.get("memory_size")
        return int(found) if found else memory()

    def held_bytes(self) -> int | None:
        """Return the bytes currently allocated by arrays."""
        return mx.get_active_memory()

    def trim(self) -> None:
        """Free cached memory."""
        mx.clear_cache()

    def forget_peak(self) -> None:
        """Reset the peak memory statistics."""
        mx.reset_peak_memory()

    def peak_bytes(self) -> int | None:
        """Return the peak bytes allocated by arrays."""
        return mx.get_peak_memory()


def _no_layers() -> BackendError:
    return BackendError(
        "mlx does not say how long a layer takes: a step is one graph, run when it is whole",
        where="--layers",
        fix="leave --layers out, or --backend torch",
    )


def _no_trace() -> BackendError:
    return BackendError(
        "mlx writes no trace that Perfetto opens; Metal's capture, which Xcode opens, is not part "
        "of minillm",
        where="--trace",
        fix="leave --trace out, or --backend torch",
    )
