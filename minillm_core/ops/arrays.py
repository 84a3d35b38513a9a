"""The array functions that model code may use, under the names of the Python array API standard.

Every ops object (TorchOps, MLXOps, NumPyOps) has all of them, so a module is written once. Arrays
also know the operators ``+ - * / @ == < <= > >=`` and plain indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from minillm_core.text import nearest

Kernel = Callable[..., Any]
Array = Any  # torch.Tensor, mlx.core.array or numpy.ndarray
Axis = int | tuple[int, ...] | None


class ArrayFunctions(Protocol):
    """Element by element unless said otherwise; results keep the dtype of their argument."""

    matmul_dtype: str
    """In which matrices may be multiplied where accuracy allows: bfloat16 on NVIDIA's GPUs."""

    def exp(self, x: Array) -> Array: ...
    def log(self, x: Array) -> Array: ...
    def sqrt(self, x: Array) -> Array: ...
    def square(self, x: Array) -> Array: ...
    def abs(self, x: Array) -> Array: ...
    def sign(self, x: Array) -> Array: ...
    def round(self, x: Array) -> Array:
        """To the nearest whole number, halves to the even one; its gradient is 0."""

    def sin(self, x: Array) -> Array: ...
    def cos(self, x: Array) -> Array: ...
    def tanh(self, x: Array) -> Array: ...
    def sigmoid(self, x: Array) -> Array: ...
    def silu(self, x: Array) -> Array:
        """x * sigmoid(x)."""

    def relu(self, x: Array) -> Array:
        """max(x, 0), with gradient 0 at 0."""

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

        float32; on a CPU with MLX. Which of the triangle's diagonal are negative is the framework's choice.
        No gradient.
        """
        ...

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array: ...
    def stack(self, arrays: Sequence[Array], axis: int = 0) -> Array: ...
    def split(self, x: Array, parts: int | Sequence[int], axis: int = -1) -> Sequence[Array]:
        """Cut into ``parts`` equal pieces, or into pieces of the given sizes.

        Prefer it to slices where a backward pass follows: one concatenation instead of a padded
        array for every slice and a sum of those.
        """
        ...

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        """Entries of ``x`` along ``axis``: indices int32 (n,) keep it, a 0-d index drops it."""

    def take_rows(self, x: Array, indices: Array) -> Array:
        """Rows of ``x`` (N, ...) at ``indices`` int32 (S,), which are distinct.

        As :meth:`take` along axis 0; its gradient is written, not added up: on a GPU that is faster,
        and the same bits each time.
        """
        ...

    def take_along_axis(self, x: Array, indices: Array, axis: int) -> Array:
        """Take one element for every index; indices int32 with as many axes as ``x``."""

    def argsort(self, x: Array, axis: int = -1) -> Array:
        """int32: where along ``axis`` the smallest stands, the next ...; equal ones in any order.

        No gradient: give it an ``x`` under :meth:`stop_gradient`.
        """

    def cumsum(self, x: Array, axis: int) -> Array:
        """Sums of the entries up to each one along ``axis``, itself included; float32 inside."""

    def tril(self, x: Array, diagonal: int = 0) -> Array:
        """Zeros above a diagonal of the last two axes: 0 is the main one, -1 that below it."""

    def scan(
        self, step: Callable[[Any, tuple[Array, ...]], Any], carry: Any, arrays: Sequence[Array]
    ) -> tuple[Any, Array]:
        """Run ``carry, y = step(carry, slices)`` along axis 1; return the last carry, and (B, n, ...).

        Arrays are (B, n, ...), slices (B, ...), and the y of each turn are stacked along axis 1. The
        turns are written out in a compiled step: for tens of chunks, not for thousands of tokens.
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
        """Return a 0-d array in ``x``'s dtype; a Python number as it is.

        Schedule values are float32, and float32 times bfloat16 is bfloat16 on one framework and
        float32 on the other.
        """

    def constant(self, numbers: Sequence[float], shape: Sequence[int]) -> Array:
        """float32, made once: a constant of the compiled step."""

    def scalar(self, number: Array | float) -> Array:
        """Make a 0-d float32 array of a number or a 0-d array."""

    def arange(self, n: int, dtype: str = "int32") -> Array:
        """Return 0, 1, ... n - 1 on the ops' device."""

    def astype(self, x: Array, dtype: str) -> Array:
        """Cast to a ``dtype`` by name: "float32", "bfloat16", "int32", "bool" ..."""

    def astype_like(self, x: Array, y: Array) -> Array:
        """Cast to the dtype of ``y``: a Buffer is float32 where the step computes in bfloat16."""

    def sum(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        """Over all axes, one or several; accurate to float32 at any size."""

    def mean(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array: ...
    def max(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array: ...
    def logsumexp(self, x: Array, axis: int = -1, keepdims: bool = False) -> Array: ...

    def stop_gradient(self, x: Array) -> Array:
        """Return ``x`` as a constant.

        On MLX, return such outputs after the differentiable ones: before them they corrupt the
        gradients.
        """


ARRAY_FUNCTIONS: tuple[str, ...] = tuple(
    sorted(name for name, f in vars(ArrayFunctions).items() if name[0] != "_" and callable(f))
)


COMMON = (
    *("abs", "cos", "exp", "log", "round", "sigmoid", "sign", "sin", "sqrt", "square", "tanh"),
    *("ones_like", "reshape", "tril", "where", "zeros_like"),
)
"""Array functions that the modules of the frameworks have by the same names and with the same meaning."""


class Known:
    """Base of every ops object: a name that is none of an op's is answered with the nearest.

    Kernels are plain attributes, so that a trace reads them without a lookup. A subclass that names its
    framework's ``module`` has the functions of :data:`COMMON` from there.
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

    def take_kernels(self, kernels: Mapping[str, Kernel]) -> None:
        """Serve each op by its function, ops of plugins included."""
        for op, kernel in kernels.items():
            setattr(self, op, kernel)

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

    if not TYPE_CHECKING:  # to which every name would be known

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            known = {*ARRAY_FUNCTIONS, *(one for one in vars(self) if callable(vars(self)[one]))}
            close = nearest(name, known)
            meant = (
                f"did you mean self.ops.{close}?"
                if close
                else f"there is {', '.join(sorted(known))}"
            )
            raise AttributeError(f"there is no op '{name}', on any framework; {meant}")


def visible(distance: Array, window: int | Array | None, documents: Array | None) -> Array:
    """Return which key each query sees in causal attention: bool (T, S), or (B, 1, T, S) with documents.

    Args:
        distance: (T, S): the query's position - the key's; the queries are the last T positions.
        window: how many keys a query sees, itself included; None: all before it.
        documents: int32 (B, S); only equal ones see each other. None: all do.
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
    """Return the axes to reduce, none counted from the end, the last one first.

    >>> last_first(None, 3), last_first((0, -1), 3), last_first(-2, 3)
    ([2, 1, 0], [2, 0], [1])
    """
    axes = range(ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return sorted({a % ndim for a in axes}, reverse=True)
