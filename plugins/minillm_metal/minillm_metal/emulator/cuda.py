"""Translation of Metal source to CUDA, to run the same kernels on an NVIDIA GPU and under its checkers."""

from __future__ import annotations

import re
from pathlib import Path

from minillm_metal.emulator.capture import Launch
from minillm_metal.emulator.translate import parsed, uncommented

__all__ = ["as_cuda"]

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


def as_cuda(launch: Launch) -> str:
    """Return a launch's kernel in CUDA C++: ``extern "C"``, under its own name, buffers as pointers."""
    text = uncommented(launch.source)
    kernel = parsed(text)
    start = re.search(r"(?:template\s*<([^>]*)>\s*)?\[\[kernel\]\]\s*void\s+\w+\s*\(", text)
    assert start is not None  # parsed() has found it
    body = text.index(") {\n", start.end()) + len(") {\n")
    end = text.find("template [[host_name", body)
    given = [one.strip() for one in launch.arguments.strip("<>").split(",")]
    named = [one.split() for one in (start[1] or "").split(",") if one.strip()]
    constants = (
        [
            f"  using {name} = {value};"
            if kind == "typename"
            else f"  constexpr {kind} {name} = {value};"
            for (kind, name), value in zip(named, given, strict=True)
        ]
        if named
        else []
    )
    places = [
        f"  const {one.type} {one.name} = {PLACES[one.attribute]};"
        for one in kernel.parameters
        if one.attribute != "buffer"
    ]
    buffers = ", ".join(f"{_plain(one.type)} {one.name}" for one in kernel.buffers)
    return "\n".join(
        (
            (Path(__file__).parent / "metal_cuda.h").read_text(),
            _plain(text[: start.start()]).replace("inline ", "__device__ inline "),
            f'extern "C" __global__ void {kernel.name}({buffers}) {{',
            *constants,
            *places,
            _plain(text[body : end if end > 0 else None]),
        )
    )


def _plain(text: str) -> str:
    """Convert shared arrays, and drop other address spaces, which CUDA infers."""
    text = re.sub(r"\bthreadgroup\s+(\w+\s+\w+\s*\[)", r"__shared__ \1", text)
    text = re.sub(r"#include <metal\w*>", "", text)
    return re.sub(r"\b(?:device|constant|threadgroup|thread)\b(?!_)\s*", "", text)
