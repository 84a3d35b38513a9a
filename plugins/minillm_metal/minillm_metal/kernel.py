"""Kernels of this distribution: the body of a Metal function in source/, launched by MLX.

On a Mac ``mx.fast.metal_kernel`` launches it. Elsewhere a test sets the launcher:
:data:`launcher` is set by :func:`minillm_metal.emulator.emulated`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

__all__ = ["Kernel", "Output", "launcher"]

SOURCE = Path(__file__).parent / "source"

Output = tuple[tuple[int, ...], mx.Dtype]
Template = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """A kernel, named after its file in source/.

    Args:
        name: source/NAME.metal is the body.
        inputs: the names of its arguments.
        outputs: the names of its results.
        headers: source/NAME.h, each before the kernel.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @cached_property
    def on_metal(self) -> Any:
        """Build MLX's kernel of it; Metal compiles it at its first launch."""
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=(SOURCE / f"{self.name}.metal").read_text(),
            header="".join((SOURCE / f"{one}.h").read_text() for one in self.headers),
        )

    def launch(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        template: Template,
        threadgroups: tuple[int, int, int],
        threads: int,
    ) -> list[mx.array]:
        """Launch the kernel.

        Args:
            inputs: copied to contiguous memory where necessary.
            outputs: shape and dtype of each.
            template: names and values of its template parameters.
            threadgroups: number along each axis.
            threads: per threadgroup, a multiple of 32.
        """
        return launcher.get()(self, inputs, outputs, template, threadgroups, threads)


def by_metal(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    outputs: Sequence[Output],
    template: Template,
    threadgroups: tuple[int, int, int],
    threads: int,
) -> list[mx.array]:
    """Launch a kernel on the GPU.

    Raises:
        RuntimeError: MLX has no Metal here.
    """
    x, y, z = threadgroups
    return kernel.on_metal(
        inputs=list(inputs),
        template=list(template),
        grid=(x * threads, y, z),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


Launcher = Callable[..., list[mx.array]]
launcher: ContextVar[Launcher] = ContextVar("launcher", default=by_metal)
"""The function that launches kernels."""
