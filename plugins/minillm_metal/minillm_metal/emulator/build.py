"""Compilation of a kernel's C++: one shared library per specialisation, cached between processes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from minillm_metal.emulator.capture import Launch
from minillm_metal.emulator.fault import KernelFault
from minillm_metal.emulator.translate import Parameter, parsed, translated

__all__ = ["compiler", "compiler_reason", "library"]

PRELUDE = '#include <metal_stdlib>\n#include "launch.h"\nusing namespace metal;\n'
INCLUDE = Path(__file__).parent / "include"
OLDEST = 12  # supports _Float16 in C++, and filling lanes' memory with a pattern
CHECKS = "bounds,signed-integer-overflow,shift,integer-divide-by-zero"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *("-ffp-contract=off", "-ftrivial-auto-var-init=pattern", f"-fsanitize={CHECKS}"),
)

OF_AXES = {
    "thread_position_in_grid": (
        "uint3(emu::threadgroup_at.x * group[0] + at.x, emu::threadgroup_at.y * group[1] + at.y, "
        "emu::threadgroup_at.z * group[2] + at.z)"
    ),
    "thread_position_in_threadgroup": "at",
    "threadgroup_position_in_grid": "emu::threadgroup_at",
    "threads_per_threadgroup": "emu::threads",
    "threadgroups_per_grid": "uint3(groups[0], groups[1], groups[2])",
    "threads_per_grid": "uint3(grid[0], grid[1], grid[2])",
}
"""Metal's attribute of three axes -> C++; if a scalar is declared, it is the first axis."""

PLACES = {
    **OF_AXES,
    "thread_index_in_threadgroup": "index",
    "thread_index_in_simdgroup": "(index % 32)",
    "simdgroup_index_in_threadgroup": "(index / 32)",
    "simdgroups_per_threadgroup": "((emu::threads.x * emu::threads.y * emu::threads.z + 31) / 32)",
    "threads_per_simdgroup": "32u",
}
"""Metal's attribute -> C++."""


@cache
def compiler() -> str | None:
    """Return the C++ compiler's path; None if the emulator cannot run."""
    return None if compiler_reason() else shutil.which("g++")


@cache
def compiler_reason() -> str:
    """Explain why the emulator cannot run here; empty if it can."""
    if sys.platform != "linux":
        return "the emulator of Metal kernels runs on Linux"
    wanted = f"the emulator of Metal kernels needs g++ {OLDEST} or newer"
    if (found := shutil.which("g++")) is None:
        return f"{wanted}: apt install g++"
    done = subprocess.run([found, "-dumpversion"], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    old = not version or int(version.partition(".")[0]) < OLDEST
    return f"{wanted}; here is {version or 'one that does not start'}" if old else ""


def library(launch: Launch, *, include: tuple[Path, ...] = (), prefix: str = "") -> ctypes.CDLL:
    """Compile a launch's kernel, unless it is cached.

    Args:
        launch: its source and template arguments.
        include: further folders of headers, already translated.
        prefix: C++ inserted before the kernel.

    Raises:
        KernelFault: the source is not Metal, or not supported by the emulator.
    """
    program = _program(launch, prefix)
    parts = "\0".join((program, _digest(), *map(str, include)))
    digest = hashlib.sha256(parts.encode()).hexdigest()[:24]
    made = _folder() / f"{digest}.so"
    if not made.exists():
        _compile(program, made, include)
    return ctypes.CDLL(str(made))


def _program(launch: Launch, prefix: str) -> str:
    kernel = parsed(launch.source)
    numbers = iter(range(len(kernel.buffers)))
    given = ", ".join(_argument(one, numbers) for one in kernel.parameters)
    return "\n".join(
        (
            prefix,
            "namespace {",
            '#line 1 "kernel"',
            translated(launch.source),
            "}",
            '#line 1 "call"',
            "static void call_kernel(uint3 at, uint index) {",
            f"  {kernel.name}{launch.arguments}({given});",
            "}\n",
        )
    )


def _argument(one: Parameter, numbers: Iterator[int]) -> str:
    if one.attribute != "buffer":
        if one.attribute not in PLACES:
            raise KernelFault(f"the emulator does not know [[{one.attribute}]]")
        first_axis = one.attribute in OF_AXES and not one.type.endswith("3")
        return f"({PLACES[one.attribute]}).x" if first_axis else PLACES[one.attribute]
    region = f"&regions[{next(numbers)}]"
    if one.type.endswith("&"):
        type_ = one.type.rstrip("&").replace("constant", "").replace("const", "").strip()
        return f"emu::Argument{{{region}}}.number<{type_}>()"
    return f"emu::Argument{{{region}}}"


def _compile(program: str, made: Path, include: tuple[Path, ...]) -> None:
    gxx = compiler()
    if gxx is None:
        raise KernelFault(compiler_reason())
    folders = [flag for folder in (INCLUDE, *include) for flag in ("-I", str(folder))]
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        source, object_, shared = (Path(folder) / f"kernel.{end}" for end in ("cpp", "o", "so"))
        source.write_text(program)
        # Linked without -fsanitize: the checks call ubsan.h instead of the compiler's library.
        _call(
            gxx,
            *FLAGS,
            "-include",
            str(_prelude(gxx)),
            *folders,
            "-c",
            str(source),
            "-o",
            str(object_),
        )
        _call(gxx, "-shared", str(object_), "-o", str(shared))
        os.replace(shared, made)  # atomic: another process may compile the same kernel


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        wrong = re.findall(r"^kernel:(\d+):\d+: error: (.*)$", done.stderr, re.M)
        said = [f"{what} (line {line})" for line, what in wrong[:8]] or [done.stderr[-2000:]]
        raise KernelFault("does not compile: " + "\n".join(said))


@cache
def _prelude(gxx: str) -> Path:
    """Precompile the replacement headers: half of a kernel's compile time. Returns the header to include."""
    folder = _folder() / _digest()
    header = folder / "prelude.h"
    if not header.with_suffix(".h.gch").exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as here:
            made = Path(here) / "prelude.h"
            made.write_text(PRELUDE)
            _call(
                gxx, *FLAGS, "-I", str(INCLUDE), "-x", "c++-header", str(made), "-o", f"{made}.gch"
            )
            os.replace(made, header)
            os.replace(f"{made}.gch", f"{header}.gch")
    return header


@cache
def _digest() -> str:
    parts = [*FLAGS, *(p.read_text() for p in sorted(INCLUDE.iterdir())), PRELUDE]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "minillm" / "metal-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
