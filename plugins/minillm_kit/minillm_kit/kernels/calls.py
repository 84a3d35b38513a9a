"""The interface to a framework: calls a kernel there, from NumPy arrays to NumPy arrays."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

import numpy as np

from minillm_core import Candidate

Layout = Literal["plain", "sliced", "transposed"]
"""Memory layouts of arrays: contiguous, a slice of wider rows, or with the last two axes swapped."""

Kernel = Callable[..., Any]


class NotArrays(Exception):
    """A kernel returns something other than arrays."""


@dataclass(frozen=True)
class Results:
    """A kernel's outputs and gradients, and its side effects on the arguments."""

    outputs: list[np.ndarray]  # float64
    dtypes: list[str]  # of the outputs
    gradients: dict[str, np.ndarray]  # float64; 0 where there is none
    written: list[str]  # arguments, or the memory around them, that were written to
    attached: list[int]  # outputs that carry a gradient


class Timed(Protocol):
    """A repeatable call, with its arguments on the device."""

    @abstractmethod
    def seconds(self, times: int) -> float:
        """Call it ``times`` times in a row, and return the seconds per call."""

    @abstractmethod
    def extra_bytes(self) -> int | None:
        """Call it, and return the peak bytes besides its arguments; None: unknown."""


class Calls(Protocol):
    """Calls of kernels on a device of a framework."""

    backend: str  # "torch", "mlx"
    device: str  # as --device takes it
    kind: str  # as candidates name it: "cpu", "cuda", "mps", "metal"

    @abstractmethod
    def call(
        self,
        kernel: Kernel,
        arguments: Mapping[str, Any],
        floats: Sequence[str],
        upstream: Sequence[np.ndarray] = (),
        *,
        dtype: str,
        wanted: Sequence[str] = (),
        layout: Layout = "plain",
        unread: bool = False,
    ) -> Results:
        """Call a kernel, and its backward pass on ``upstream`` where gradients are wanted.

        Every array is in the middle of a buffer filled with NaN (0 for integers), so that reads and
        writes out of bounds are detected.

        Args:
            kernel: with its op's signature.
            arguments: by name; arrays, also within a named tuple, become the framework's.
            floats: the arguments to pass in ``dtype``.
            upstream: gradients of the differentiable outputs (the first outputs); a number of
                shape () for a larger output is broadcast without a copy.
            dtype: the compute dtype.
            wanted: the arguments to differentiate.
            layout: of the floats, and of the upstream gradients.
            unread: refuse that the kernel reads a number of an array on the host; torch only.

        Raises:
            NotArrays: an output is not an array.
            HostRead: the kernel, or its backward pass, reads a number where ``unread``.
        """

    @abstractmethod
    def poison(self, shapes: Sequence[tuple[int, ...]], dtype: str) -> None:
        """Fill memory of these sizes with NaN and free it, to expose outputs that are not written."""

    @abstractmethod
    def uninitialised(self) -> AbstractContextManager[None]:
        """Return a context in which new memory is filled with NaN, where the framework supports that."""

    @abstractmethod
    def compilations(self) -> int:
        """Count the graphs that the framework has compiled in this process."""

    @abstractmethod
    def timed(
        self,
        kernel: Kernel,
        arguments: Mapping[str, Any],
        floats: Sequence[str],
        *,
        dtype: str,
        wanted: Sequence[str] = (),
    ) -> Timed:
        """Move the arguments to the device, contiguous; with ``wanted`` a call has a backward pass."""

    @abstractmethod
    def product(self, n: int, dtype: str) -> Timed:
        """Return a timed product of two matrices (n, n)."""

    @abstractmethod
    def copy(self, size: int) -> Timed:
        """Return a timed copy of ``size`` bytes."""

    @abstractmethod
    def out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means that the device is out of memory."""


def listed(outputs: Any, kind: type) -> list[Any]:
    """Return a kernel's outputs as a list.

    Raises:
        NotArrays: one is not of the type ``kind``.
    """
    found = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    for index, y in enumerate(found):
        if not isinstance(y, kind):
            wanted = f"{kind.__module__.partition('.')[0]}'s arrays are {kind.__name__}"
            raise NotArrays(f"output {index} is of type {type(y).__name__}; {wanted}")
    return found


def loaded(candidate: Candidate) -> Kernel:
    """Import a kernel; one that reads masks on the host is given them there.

    Raises:
        BackendError: it cannot be imported.
    """
    kernel = candidate.load()
    if not candidate.host_masks:
        return kernel

    def with_host_masks(*arrays: Any, **others: Any) -> Any:
        masks = {name: others[name] for name in ("window", "documents") if name in others}
        moved = {name: mask.cpu() for name, mask in masks.items() if hasattr(mask, "cpu")}
        return kernel(*arrays, **others | moved)

    return with_host_masks


def calls_on(backend: str, device: str) -> Calls:
    """Import the framework and return its calls.

    Args:
        backend: ``torch`` or ``mlx``.
        device: as ``--device`` takes it.

    Raises:
        BackendError: the framework does not find the device.
    """
    if backend == "torch" and device == "cpu":  # read once, when torch loads OpenMP; as in runs
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return import_module(f"minillm_kit.kernels.on_{backend}").make(device)


def kind_of(backend: str, device: str) -> str:
    """Return a device's kind, in the terms of candidates: MLX's gpu is ``metal`` or ``cuda``."""
    kind = device.partition(":")[0]
    if backend == "mlx" and kind == "gpu":
        return "metal" if sys.platform == "darwin" else "cuda"
    return kind
