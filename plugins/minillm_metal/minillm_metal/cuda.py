"""Translation of Metal source to CUDA: the same kernels on an NVIDIA GPU, through MLX's CUDA build or its checkers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = ["PLACES", "SOURCE", "body_as_cuda", "functions", "header_as_cuda", "plain"]

SOURCE = Path(__file__).parent / "source"

PLACES = {
    "thread_position_in_grid": (
        "uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, "
        "blockIdx.z * blockDim.z + threadIdx.z}"
    ),
    "threadgroup_position_in_grid": "uint3{blockIdx.x, blockIdx.y, blockIdx.z}",
    "threads_per_threadgroup": "uint3{blockDim.x, blockDim.y, blockDim.z}",
    "thread_index_in_threadgroup": "threadIdx.x",  # threadgroups have one axis
    "thread_index_in_simdgroup": "threadIdx.x % 32",
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
}
"""Metal's attribute -> CUDA."""


def body_as_cuda(body: str) -> str:
    """Return the body of a kernel in CUDA; the launcher declares its arguments and template parameters."""
    places = [f"  const auto {name} = {at};" for name, at in PLACES.items() if name in body]
    return "\n".join((*places, plain(body)))


@cache
def header_as_cuda(headers: tuple[str, ...]) -> str:
    """Return source/NAME.h of each name in CUDA, behind what they use of Metal's library."""
    used = (SOURCE / "metal_cuda.h").read_text()
    own = "".join((SOURCE / f"{one}.h").read_text() for one in headers)
    return used + functions(plain(own))


def functions(text: str) -> str:
    """Mark the helper functions of a header as functions of the device."""
    return text.replace("inline ", "__device__ inline ")


def plain(text: str) -> str:
    """Convert shared arrays, and drop other address spaces, which CUDA infers."""
    text = re.sub(r"\bthreadgroup\s+(\w+\s+\w+\s*\[)", r"__shared__ \1", text)
    text = re.sub(r"#include <metal\w*>", "", text)
    return re.sub(r"\b(?:device|constant|threadgroup|thread)\b(?!_)\s*", "", text)
