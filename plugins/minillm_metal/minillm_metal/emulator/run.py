"""Runs of launches in several orders of lanes and threadgroups, whose results must be bitwise equal."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minillm_metal.emulator.build import library
from minillm_metal.emulator.capture import Launch
from minillm_metal.emulator.fault import KernelFault
from minillm_metal.emulator.translate import parsed

__all__ = ["ORDERS", "run", "sparse"]

ORDERS = ("forward", "backward", "shuffled", "shuffled again")
"""Orders in which lanes, and threadgroups, are run."""

NORESERVE = 0x4000  # mmap.MAP_NORESERVE, available in Python from 3.13 on


class Buffer(ctypes.Structure):
    """A buffer, as declared in launch.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("element", ctypes.c_size_t),
        ("writable", ctypes.c_int),
        ("filled", ctypes.c_size_t),
        ("first_unwritten", ctypes.c_size_t),
    )


def run(
    launch: Launch,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    *,
    orders: Sequence[str] = ORDERS,
    threadgroups: Sequence[int] | None = None,
    filled: Sequence[int] | None = None,
    include: tuple[Path, ...] = (),
    prefix: str = "",
) -> None:
    """Run a launch and write its results into ``outputs``.

    Args:
        launch: the launch captured from MLX.
        inputs: contiguous; bfloat16 as uint16.
        outputs: contiguous, of the right shapes; their values are overwritten.
        orders: of :data:`ORDERS`; the results of all must be bitwise equal.
        threadgroups: those to run, by their index in the grid; None: all, and then every element of
            every output must be written.
        filled: with ``threadgroups``, the number of elements of each output that they write.
        include: see :func:`library`.
        prefix: see :func:`library`.

    Raises:
        ValueError: an order is unknown, or none is given.
        KernelFault: an access out of bounds, a race, a divergent barrier, a read of uninitialised
            memory, an output that is not completely written, a result that depends on the order, ...
    """
    if not orders or (unknown := [one for one in orders if one not in ORDERS]):
        wrong = f"no order {unknown[0]!r}" if orders else "at least one order is needed"
        raise ValueError(f"{wrong}; orders are {', '.join(ORDERS)}")
    if 0 in launch.grid + launch.threadgroup:
        raise KernelFault(f"{_called(launch)}: its grid {launch.grid} has no threads")
    made = library(launch, include=include, prefix=prefix)
    first: list[bytes] = []
    for number, order in enumerate(orders):
        for one in outputs:
            if threadgroups is None:  # otherwise filling may exceed the memory
                one.reshape(-1).view(np.uint8)[:] = 0xFF
        index = ORDERS.index(order)
        try:
            _run_once(made, launch, inputs, outputs, index, number + 1, threadgroups, filled)
        except KernelFault as fault:
            raise KernelFault(f"{_called(launch)}, order '{order}': {fault}") from None
        if threadgroups is not None:
            continue
        found = [one.tobytes() for one in outputs]
        if first and found != first:
            differ = f"the result depends on the order of lanes: {orders[0]}, {order}"
            raise KernelFault(f"{_called(launch)}: {differ}")
        first = first or found


def _called(launch: Launch) -> str:
    """Return the kernel's name, without MLX's prefix and template arguments."""
    return launch.name.split("__")[0].removeprefix("custom_kernel_")


def sparse(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
    """Return zeros that occupy memory only where they are touched, to launch kernels on arrays that do not fit."""
    count = int(np.prod(shape, dtype=np.int64))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize), flags=flags)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def _run_once(
    made: ctypes.CDLL,
    launch: Launch,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    order: int,
    seed: int,
    threadgroups: Sequence[int] | None,
    filled: Sequence[int] | None,
) -> None:
    arrays = [(one, False) for one in _with_shapes(launch, inputs)] + [
        (one, True) for one in outputs
    ]
    names = [one.name for one in parsed(launch.source).buffers]
    if len(names) != len(arrays):
        raise KernelFault(f"the kernel takes {len(names)} buffers, and is given {len(arrays)}")
    buffers = (Buffer * len(arrays))()
    for buffer, name, (array, writable) in zip(buffers, names, arrays, strict=True):
        if not array.flags.c_contiguous:
            raise KernelFault(f"{name} is not contiguous")
        buffer.name, buffer.begin = name.encode(), array.ctypes.data
        buffer.bytes, buffer.element = array.nbytes, array.itemsize
        buffer.writable = writable
    message = ctypes.create_string_buffer(1024)
    triple = ctypes.c_uint * 3
    chosen = None if threadgroups is None else (ctypes.c_uint * len(threadgroups))(*threadgroups)
    wrong = made.launch(
        buffers,
        len(arrays),
        triple(*launch.grid),
        triple(*launch.threadgroup),
        chosen,
        ctypes.c_uint(len(threadgroups or ())),
        min(order, 2),
        ctypes.c_uint(seed * 7919),
        message,
    )
    if wrong:
        raise KernelFault(message.value.decode())
    written = [b for b, (_, writable) in zip(buffers, arrays, strict=True) if writable]
    wanted = filled if threadgroups is not None else [one.size for one in outputs]
    for buffer, count in zip(written, wanted or (), strict=True):
        if buffer.filled != count:
            name = buffer.name.decode()
            where = f"; {name}[{buffer.first_unwritten}] is not" if threadgroups is None else ""
            raise KernelFault(f"{buffer.filled} of {count} elements of {name} are written{where}")


def _with_shapes(launch: Launch, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the inputs, each followed by its shape, strides and number of axes, if those are passed."""
    found: list[np.ndarray] = []
    passed = launch.shapes or ((False, False, False),) * len(inputs)
    for array, (shape, strides, axes) in zip(inputs, passed, strict=True):
        found.append(array)
        if array.ndim and shape:
            found.append(np.array(array.shape, np.int32))
        if array.ndim and strides:
            found.append(np.array([s // array.itemsize for s in array.strides], np.int64))
        if array.ndim and axes:
            found.append(np.array([array.ndim], np.int32))
    return found
