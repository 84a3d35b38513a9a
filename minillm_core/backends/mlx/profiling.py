"""Where a step's time goes on MLX: gradients and update, run apart; it offers no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from minillm_core.backends.base import Batch
from minillm_core.backends.mlx import random
from minillm_core.backends.mlx.trainer import MLXTrainer
from minillm_core.backends.profiling import Profiler
from minillm_core.errors import BackendError

__all__ = ["MLXProfiler"]


class MLXProfiler(Profiler):
    """Looks into the steps of one trainer."""

    notes = (
        "mlx makes forward and backward pass one graph: 'gradients' is both, and gradients and "
        "update were timed as two graphs, where a step of one micro-batch is one",
    )

    def __init__(self, trainer: MLXTrainer) -> None:
        self.trainer = trainer

    def check(self, *, layers: bool, trace: bool) -> None:
        """Neither."""
        if layers:
            raise _no_layers()
        if trace:
            raise _no_trace()

    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Seconds of the gradients and of the update; nothing is kept of what they give."""
        trainer = self.trainer
        staged = {name: int(values[name]) for name in trainer.staged}
        given = {n: mx.array(float(v)) for n, v in values.items() if n not in staged}
        given["normaliser"] = mx.array(1.0 / supervised)
        batches = [trainer.moved(host) for host in micro]
        copies = trainer.weights.copies(trainer.masters)
        mean = mx.array(1.0 / len(batches))
        first, update = (
            trainer.graphs.part(name, stage) for name, stage in (("first", staged), ("update", {}))
        )
        found = {"gradients": 0.0, "optimizer": 0.0}
        with random.kept():
            sums = first(copies, trainer.state, batches[0], given)
            mx.eval(update(trainer.masters, trainer.state, sums, given, mean))  # traced, compiled
            for batch in batches:
                began = time.perf_counter()
                sums = first(copies, trainer.state, batch, given)
                mx.eval(sums)
                found["gradients"] += time.perf_counter() - began
            began = time.perf_counter()
            mx.eval(update(trainer.masters, trainer.state, sums, given, mean))
            found["optimizer"] = time.perf_counter() - began
        return found

    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """MLX cannot tell."""
        raise _no_layers()

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """MLX has none that Perfetto opens."""
        raise _no_trace()

    def held_bytes(self) -> int | None:
        """What arrays hold."""
        return mx.get_active_memory()

    def trim(self) -> None:
        """Give back what is cached."""
        mx.clear_cache()

    def forget_peak(self) -> None:
        """The peak is from now on."""
        mx.reset_peak_memory()

    def peak_bytes(self) -> int | None:
        """The most that arrays held."""
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
