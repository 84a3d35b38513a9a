"""The emulated launcher: runs this distribution's Python functions unchanged, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_metal.emulator.capture import Launch, captured
from minillm_metal.emulator.run import ORDERS, run
from minillm_metal.kernel import Kernel, Output, by_gpu, launcher

__all__ = ["Done", "as_numpy", "emulated"]

NUMPY = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,  # as its bits
    mx.int32: np.int32,
    mx.uint32: np.uint32,
}


@dataclass(frozen=True)
class Done:
    """A finished launch: its inputs and outputs; bfloat16 as uint16."""

    launch: Launch
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


@contextmanager
def emulated(
    orders: Sequence[str] = ORDERS, *, change: Callable[[Launch], Launch] = lambda launch: launch
) -> Iterator[list[Done]]:
    """Run kernels in the emulator; yield the list that collects the launches.

    Each launch computes immediately, so that ``mx.compile`` and ``mx.vmap`` cannot contain one.

    Args:
        orders: see :func:`run`.
        change: called with each launch, returns the launch to run: to plant faults in tests.
    """
    done: list[Done] = []

    def launch(
        kernel: Kernel,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        template: Any,
        threadgroups: tuple[int, int, int],
        threads: int,
    ) -> list[mx.array]:
        given = (outputs, template, threadgroups, threads)
        one = change(captured(lambda *xs: by_gpu(kernel, xs, *given), *inputs))
        made = [np.empty(shape, NUMPY[dtype]) for shape, dtype in outputs]
        given_inputs = [as_numpy(x) for x in inputs]
        run(one, given_inputs, made, orders=orders)
        done.append(Done(one, tuple(given_inputs), tuple(made)))
        pairs = zip(made, outputs, strict=True)
        return [
            mx.array(x).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(x)
            for x, (_, dtype) in pairs
        ]

    token = launcher.set(launch)
    try:
        yield done
    finally:
        launcher.reset(token)


def as_numpy(x: mx.array) -> np.ndarray:
    """Return an array's values, contiguous; bfloat16 as its bits, uint16."""
    return np.ascontiguousarray(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x))
