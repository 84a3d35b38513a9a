"""Metal kernels on a CPU: the source that MLX generates, compiled as C++ and checked while it runs.

MLX exports its launches (:func:`capture`); :func:`translated` converts them to C++ whose
pointers have address spaces; g++ compiles it with replacements for Apple's headers; and
:func:`run` runs every lane as a fiber, in several orders, with each access checked. It does not model
speed, registers, Apple's fast-math or its compiler. Requires Linux with g++ 12 or newer.
"""

from __future__ import annotations

from minillm_metal.emulator.build import compiler, compiler_reason
from minillm_metal.emulator.capture import Launch, capture, captured
from minillm_metal.emulator.cuda import as_cuda
from minillm_metal.emulator.fault import KernelFault
from minillm_metal.emulator.launcher import Done, emulated
from minillm_metal.emulator.run import ORDERS, run, sparse
from minillm_metal.emulator.translate import translated

__all__ = [
    "ORDERS",
    "Done",
    "KernelFault",
    "Launch",
    "as_cuda",
    "capture",
    "captured",
    "compiler",
    "compiler_reason",
    "emulated",
    "run",
    "sparse",
    "translated",
]
