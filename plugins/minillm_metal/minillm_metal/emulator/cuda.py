"""A captured launch in CUDA, to run it on an NVIDIA GPU without MLX and under its checkers."""

from __future__ import annotations

import re

from minillm_metal.cuda import PLACES, functions, header_as_cuda, plain
from minillm_metal.emulator.capture import Launch
from minillm_metal.emulator.translate import parsed, uncommented

__all__ = ["as_cuda"]


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
    buffers = ", ".join(f"{plain(one.type)} {one.name}" for one in kernel.buffers)
    return "\n".join(
        (
            header_as_cuda(()),
            functions(plain(text[: start.start()])),
            f'extern "C" __global__ void {kernel.name}({buffers}) {{',
            *constants,
            *places,
            plain(text[body : end if end > 0 else None]),
        )
    )
