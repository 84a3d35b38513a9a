"""Kernels of this distribution: the body of a Metal function in source/, launched by MLX.

On a Mac ``mx.fast.metal_kernel`` launches it, and on an NVIDIA GPU ``mx.fast.cuda_kernel``, translated. Elsewhere
a test sets the launcher: :data:`launcher` is set by :func:`minillm_metal.emulator.emulated`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import mlx.core as mx

from minillm_metal.cuda import SOURCE, body_as_cuda, header_as_cuda

__all__ = ["Kernel", "Output", "launcher"]

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

    @cached_property
    def on_cuda(self) -> Any:
        """Build MLX's CUDA kernel of it, which NVRTC compiles at its first launch."""
        body = body_as_cuda((SOURCE / f"{self.name}.metal").read_text())
        header = header_as_cuda(self.headers)
        return mx.fast.cuda_kernel(
            # MLX keeps compiled kernels on disk by their names, also those of an earlier source
            name=f"{self.name}_{crc32((header + body).encode()):08x}",
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=body,
            header=header,
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
            inputs: copied to contiguous memory if necessary.
            outputs: shape and dtype of each.
            template: names and values of its template parameters.
            threadgroups: number along each axis.
            threads: per threadgroup, a multiple of 32.
        """
        return launcher.get()(self, inputs, outputs, template, threadgroups, threads)


def by_gpu(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    outputs: Sequence[Output],
    template: Template,
    threadgroups: tuple[int, int, int],
    threads: int,
) -> list[mx.array]:
    """Launch a kernel on the GPU.

    Raises:
        RuntimeError: MLX has no GPU here.
    """
    x, y, z = threadgroups
    build = kernel.on_cuda if mx.cuda.is_available() else kernel.on_metal
    return build(
        inputs=list(inputs),
        template=list(template),
        grid=(x * threads, y, z),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


Launcher = Callable[..., list[mx.array]]
launcher: ContextVar[Launcher] = ContextVar("launcher", default=by_gpu)
"""The function that launches kernels."""
