"""The array functions that model code may use, under the names of the Python array API standard.

Every ops object (TorchOps, MLXOps, NumPyOps) has all of them, so a module is written once. Arrays
also have the operators ``+ - * / ** @ == != < <= > >=``, ``& | ~`` of bool, and plain indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import numpy as np

from minillm_core.text import did_you_mean

Kernel = Callable[..., Any]
Array = Any  # torch.Tensor, mlx.core.array or numpy.ndarray
Axis = int | tuple[int, ...] | None


class ArrayFunctions(Protocol):
    """Array functions: elementwise unless documented otherwise; results keep the dtype of their argument."""

    matmul_dtype: str
    """The dtype for matrix products that tolerate low precision: bfloat16 on NVIDIA GPUs, else float32."""

    def exp(self, x: Array) -> Array: ...
    def log(self, x: Array) -> Array: ...
    def sqrt(self, x: Array) -> Array: ...
    def square(self, x: Array) -> Array: ...
    def abs(self, x: Array) -> Array: ...
    def sign(self, x: Array) -> Array: ...
    def round(self, x: Array) -> Array:
        """Round to the nearest integer, halves to even; the gradient is 0."""

    def sin(self, x: Array) -> Array: ...
    def cos(self, x: Array) -> Array: ...
    def tanh(self, x: Array) -> Array: ...
    def sigmoid(self, x: Array) -> Array: ...
    def silu(self, x: Array) -> Array:
        """Compute x * sigmoid(x)."""

    def relu(self, x: Array) -> Array:
        """Compute max(x, 0), with gradient 0 at 0."""

    def maximum(self, x: Array, y: Array | float) -> Array: ...
    def minimum(self, x: Array, y: Array | float) -> Array: ...
    def clip(self, x: Array, low: float, high: float) -> Array: ...
    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array: ...

    def reshape(self, x: Array, shape: Sequence[int]) -> Array: ...
    def permute_dims(self, x: Array, axes: Sequence[int]) -> Array: ...
    def matrix_transpose(self, x: Array) -> Array:
        """Swap the last two axes."""

    def qr(self, x: Array) -> tuple[Array, Array]:
        """Decompose x (..., R, C), R >= C, into orthonormal columns (..., R, C) and an upper triangle (..., C, C).

        float32; MLX runs it on the CPU. The signs of the triangle's diagonal depend on the framework.
        No gradient.
        """
        ...

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array: ...
    def stack(self, arrays: Sequence[Array], axis: int = 0) -> Array: ...
    def split(self, x: Array, parts: int | Sequence[int], axis: int = -1) -> Sequence[Array]:
        """Split into ``parts`` equal pieces, or into pieces of the given sizes.

        Prefer it to slices where gradients flow: the backward pass is one concatenation instead of a
        padded array for every slice and the sum of these.
        """
        ...

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        """Take entries of ``x`` along ``axis``: indices int32 (n,) keep the axis, a 0-d index drops it."""

    def take_rows(self, x: Array, indices: Array) -> Array:
        """Take the rows of ``x`` (N, ...) at ``indices`` int32 (S,), which must be distinct.

        Like :meth:`take` along axis 0, but the gradient is written instead of accumulated: on a GPU
        that is faster, and deterministic.
        """
        ...

    def take_along_axis(self, x: Array, indices: Array, axis: int) -> Array:
        """Take one element for every index; indices int32 with as many axes as ``x``."""

    def argsort(self, x: Array, axis: int = -1) -> Array:
        """Return the int32 indices that sort ``x`` along ``axis`` in ascending order; ties in any order.

        No gradient: wrap ``x`` in :meth:`stop_gradient`.
        """

    def cumsum(self, x: Array, axis: int) -> Array:
        """Compute the inclusive cumulative sum along ``axis``, accumulated in float32."""

    def tril(self, x: Array, diagonal: int = 0) -> Array:
        """Set the entries above a diagonal of the last two axes to 0: 0 is the main diagonal, -1 the one below."""

    def scan(
        self, step: Callable[[Any, tuple[Array, ...]], Any], carry: Any, arrays: Sequence[Array]
    ) -> tuple[Any, Array]:
        """Run ``carry, y = step(carry, slices)`` along axis 1; return the last carry and all y, (B, n, ...).

        Arrays are (B, n, ...), slices (B, ...); the y of all iterations are stacked along axis 1. A
        compiled step unrolls the loop: use it for tens of chunks, not for thousands of tokens.
        """
        ...

    def expand_dims(self, x: Array, axis: int) -> Array: ...
    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array: ...

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Array: ...
    def ones(self, shape: Sequence[int], dtype: str = "float32") -> Array: ...
    def zeros_like(self, x: Array) -> Array: ...
    def ones_like(self, x: Array) -> Array: ...
    def full_like(self, x: Array, value: float) -> Array: ...
    def like(self, number: Array | float, x: Array) -> Array:
        """Cast a 0-d array to ``x``'s dtype; return a Python number unchanged.

        Schedule values are float32, and a 0-d float32 times bfloat16 is bfloat16 on one framework and
        float32 on the other.
        """

    def constant(self, numbers: Sequence[float], shape: Sequence[int]) -> Array:
        """Return the numbers as a float32 array of ``shape``: a constant of the compiled step."""

    def scalar(self, number: Array | float) -> Array:
        """Convert a number or a 0-d array to a 0-d float32 array."""

    def arange(self, n: int, dtype: str = "int32") -> Array:
        """Return 0, 1, ... n - 1 on the ops' device."""

    def astype(self, x: Array, dtype: str) -> Array:
        """Cast to a ``dtype`` by name: "float32", "bfloat16", "int32", "bool" ..."""

    def astype_like(self, x: Array, y: Array) -> Array:
        """Cast to the dtype of ``y``: a Buffer stays float32 even if the step computes in bfloat16."""

    def sum(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        """Sum over all axes, one or several; accurate to float32 at any size."""

    def mean(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array: ...
    def max(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array: ...
    def logsumexp(self, x: Array, axis: int = -1, keepdims: bool = False) -> Array: ...

    def stop_gradient(self, x: Array) -> Array:
        """Return ``x`` detached from the graph.

        On MLX, a function must return such outputs after its differentiable ones: in front of them
        they corrupt the gradients.
        """


ARRAY_FUNCTIONS: tuple[str, ...] = tuple(
    sorted(name for name, f in vars(ArrayFunctions).items() if name[0] != "_" and callable(f))
)


COMMON = (
    *("abs", "cos", "exp", "log", "round", "sigmoid", "sign", "sin", "sqrt", "square", "tanh"),
    *("ones_like", "reshape", "tril", "where", "zeros_like"),
)
"""Array functions that ``torch`` and ``mlx.core`` provide under the same name with the same meaning."""


class Known:
    """Base of every ops object: the error for an unknown op suggests the nearest name.

    Kernels are plain attributes, so that a trace reads them without a lookup. A subclass with a
    ``module`` (``torch``, ``mlx.core``) takes the functions of :data:`COMMON` from it.
    """

    linear: Kernel
    embedding: Kernel
    rms_norm: Kernel
    rotate: Kernel
    attention: Kernel
    swiglu: Kernel
    logits: Kernel
    gram: Kernel
    linear_cross_entropy: Kernel
    token_losses: Kernel

    def __init_subclass__(cls, module: Any = None) -> None:
        super().__init_subclass__()
        for name in COMMON if module else ():
            setattr(cls, name, staticmethod(getattr(module, name)))

    def scan(
        self, step: Callable[[Any, tuple[Array, ...]], Any], carry: Any, arrays: Sequence[Array]
    ) -> tuple[Any, Array]:
        """Run a step along axis 1: see :class:`ArrayFunctions`."""
        ops, found = cast(ArrayFunctions, self), []
        cut = [ops.split(x, x.shape[1], 1) for x in arrays]  # each (B, 1, ...)
        for turn in zip(*cut, strict=True):
            slices = tuple(ops.reshape(x, (x.shape[0], *x.shape[2:])) for x in turn)
            carry, y = step(carry, slices)
            found.append(y)
        return carry, ops.stack(found, 1)

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            known = {*ARRAY_FUNCTIONS, *(one for one in vars(self) if callable(vars(self)[one]))}
            meant = did_you_mean(name, known, "self.ops.") or f"there is {', '.join(sorted(known))}"
            raise AttributeError(f"there is no op '{name}', on any framework; {meant.strip()}")


def dtype_name(array: Array) -> str:
    """Return a dtype's name, the same on every framework: ``float32``."""
    return str(array.dtype).rpartition(".")[2]


def mismatch(made: Any, old: Any) -> str | None:
    """Return the type of ``made`` if it is no array like ``old``, its shape if that differs, else None."""
    shape = getattr(made, "shape", None)
    if shape is None or isinstance(made, np.ndarray) > isinstance(old, np.ndarray):
        return type(made).__name__
    return None if tuple(shape) == tuple(old.shape) else f"shape {tuple(shape)}"


def visible(distance: Array, window: int | Array | None, documents: Array | None) -> Array:
    """Return the causal attention mask, True where a query sees a key: bool (T, S), with documents (B, 1, T, S).

    Args:
        distance: (T, S): query position - key position; the queries are the last T positions.
        window: how many keys a query sees, itself included; None: all earlier ones.
        documents: int32 (B, S) document ids; a query sees only keys of its document. None: no mask.
    """
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is not None:
        queries, keys = distance.shape
        own = documents[:, None, keys - queries :, None] == documents[:, None, None, :]
        mask = mask & own
    return mask


def last_first(axis: Axis, ndim: int) -> list[int]:
    """Return the axes to reduce, non-negative, in descending order.

    >>> last_first(None, 3), last_first((0, -1), 3), last_first(-2, 3)
    ([2, 1, 0], [2, 0], [1])
    """
    axes = range(ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return sorted({a % ndim for a in axes}, reverse=True)
