"""Data parallelism on MLX: mx.distributed (ring, jaccl, nccl), started by mlx.launch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core import BackendError, Plan
from minillm_core.inspection import Detected, Ranks, launched
from minillm_mesh import step_checks


class MLXRanks(Ranks):
    """The processes started by mlx.launch.

    Args:
        detected: the command's backend and device.

    Raises:
        BackendError: the processes cannot connect.
    """

    unsharded_reason = "on MLX each process makes the whole update"

    def __init__(self, detected: Detected) -> None:
        _, size = launched()
        try:
            self.group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise _join_error(size, str(error)) from error
        if self.group.size() != size:
            raise _join_error(size, f"mx.distributed has {self.group.size()}")
        self.rank, self.size, self.transport = self.group.rank(), size, "mx.distributed"

    def divide(self, plan: Plan) -> Sequence[str]:
        """Set up the division of a run; its steps must be divisible by the number of processes."""
        step_checks.check(plan, self.size)
        return super().divide(plan)

    def all_reduce_sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """All-reduce arrays (sum) over all ranks, in one flat float32 buffer."""
        return self._reduced(arrays, mx.distributed.all_sum)

    def all_reduce_max(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """All-reduce arrays (elementwise maximum) over all ranks."""
        return self._reduced(arrays, mx.distributed.all_max)

    def _reduced(self, arrays: Sequence[mx.array], how: Callable[..., mx.array]) -> list[mx.array]:
        flat = how(mx.concatenate([one.reshape(-1) for one in arrays]), group=self.group)  # (N,)
        ends = np.cumsum([one.size for one in arrays])[:-1].tolist()
        parts = mx.split(flat, ends)
        return [part.reshape(one.shape) for part, one in zip(parts, arrays, strict=True)]

    def all_gather(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """All-gather numbers of every rank, as the bits of float64."""
        mine = np.array(numbers, np.float64)
        bits = mx.array(mine.view(np.int32))
        each = np.array(mx.distributed.all_gather(bits, group=self.group))
        return [tuple(one.view(np.float64).tolist()) for one in each.reshape(self.size, -1)]

    def broadcast(self, value: Any = None) -> Any:
        """Broadcast rank 0's value, as JSON, and return it."""
        text = json.dumps(value).encode() if self.is_main else b""
        size = int(self.all_gather([len(text)])[0][0])
        sent = np.frombuffer(text, np.uint8) if self.is_main else np.zeros(size, np.uint8)
        summed = mx.distributed.all_sum(mx.array(sent), group=self.group)  # the others send zeros
        return json.loads(np.array(summed).tobytes())


def _join_error(size: int, why: str) -> BackendError:
    return BackendError(
        f"{size} processes were started, but MLX does not connect them",
        where=why[:200],
        fix="start them with mlx.launch: mlx.launch -n 2 -- python -m minillm_core train",
    )


__all__ = ["MLXRanks"]
