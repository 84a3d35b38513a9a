"""Quantised optimizer state: entries of kind ``like:bfloat16`` or ``like:int8`` are packed between updates.

The stage takes and returns float32. In ``like:int8`` each block of 256 numbers of a parameter, in the
order of its elements, shares a scale s, the largest magnitude in the block; a code c from -127 to 127
represents

    s sign(c) (c / 127)^4

Fourth roots are rounded to nearest, deterministically; a number other than 0 never becomes 0.
The error is relative: at most 1.6 % near s, 5 % at s / 100; the smallest magnitude is 4e-9 s.
Linear 8-bit quantisation loses numbers below s / 254: most of a block of Adam's second moments.
A running mean that changes by less than half a code step keeps its code unless its scale changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

BLOCK = 256
"""How many numbers share a scale."""

LEVELS = 127.0
SCALE = ".scale"
"""Suffix of the entry that holds an entry's scales, float32 (blocks,)."""

TINY = 1e-38  # least scale to divide by: a block of zeros stays zeros

BFLOAT16, INT8 = "like:bfloat16", "like:int8"
NARROW = (BFLOAT16, INT8)


class Storage(NamedTuple):
    """The shape and dtype of an array of optimizer state of one parameter, as stored between updates."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def zeros_arguments(self) -> tuple[Any, ...]:
        """The arguments of ``zeros`` that create the array."""
        return (self.shape,) if self.dtype == "float32" else tuple(self)

    @property
    def nbytes(self) -> int:
        """The array's size in bytes."""
        return prod(self.shape) * {"float32": 4, "bfloat16": 2, "int8": 1}[self.dtype]


def stored(entry: str, kind: str, shape: tuple[int, ...]) -> dict[str, Storage]:
    """Return the arrays stored for an entry of a narrow kind, by name."""
    if kind == BFLOAT16:
        return {entry: Storage(shape, "bfloat16")}
    return {entry: Storage(shape, "int8"), f"{entry}{SCALE}": Storage((-(-prod(shape) // BLOCK),))}


def packed(ops: Any, entry: str, kind: str, array: Any, axes: int) -> dict[str, Any]:
    """Pack a float32 entry into the arrays that are stored for it.

    Args:
        ops: the framework's array functions.
        entry: the entry's name.
        kind: one of NARROW.
        array: float32 (N, *shape), or (*shape).
        axes: 1 if N parameters are stacked, else 0.
    """
    if kind == BFLOAT16:
        return {entry: ops.astype(array, "bfloat16")}
    stack, size = tuple(array.shape[:axes]), prod(array.shape[axes:])
    flat, blocks = ops.reshape(array, (*stack, size)), -(-size // BLOCK)
    if rest := blocks * BLOCK - size:
        flat = ops.concat([flat, ops.zeros((*stack, rest))], axes)
    x = ops.reshape(flat, (*stack, blocks, BLOCK))
    size_of = ops.maximum(x, -x)
    scale = ops.max(size_of, -1, keepdims=True)  # (..., blocks, 1)
    root = ops.sqrt(ops.sqrt(size_of / ops.maximum(scale, TINY)))
    # a cast truncates: adding a half rounds to nearest
    code = ops.where(size_of > 0, ops.maximum(root * LEVELS + 0.5, 1.0), root)
    code = ops.astype(code, "int8")
    code = ops.reshape(ops.where(x < 0, -code, code), (*stack, blocks * BLOCK))
    code = ops.split(code, [size, rest], axes)[0] if rest else code
    return {
        entry: ops.reshape(code, tuple(array.shape)),
        f"{entry}{SCALE}": ops.reshape(scale, (*stack, blocks)),
    }


def unpacked(ops: Any, entry: str, kind: str, state: Mapping[str, Any], axes: int) -> Any:
    """Unpack an entry to float32: the inverse of :func:`packed`, whose result ``state`` contains."""
    array = ops.astype(state[entry], "float32")
    if kind == BFLOAT16:
        return array
    stack, size, scale = (
        tuple(array.shape[:axes]),
        prod(array.shape[axes:]),
        state[f"{entry}{SCALE}"],
    )
    wide = ops.broadcast_to(ops.expand_dims(scale, -1), (*scale.shape, BLOCK))
    wide = ops.reshape(wide, (*stack, scale.shape[-1] * BLOCK))
    if rest := wide.shape[-1] - size:
        wide = ops.split(wide, [size, rest], axes)[0]
    whole = ops.square(ops.square(array / LEVELS)) * ops.reshape(wide, tuple(array.shape))
    return ops.where(array < 0, -whole, whole)
