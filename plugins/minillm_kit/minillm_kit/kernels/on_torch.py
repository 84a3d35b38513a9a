"""Calls of kernels on torch."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm_core import BackendError
from minillm_kit.check import HostRead
from minillm_kit.kernels.calls import Kernel, Layout, Results, kind_of, listed

GUARD = 64
"""Guard elements before and after an array: they keep the alignment of newly allocated memory."""

GAP = 8
"""Elements between two rows of a sliced array."""


def make(device: str) -> TorchCalls:
    """Create the calls on a device.

    Raises:
        BackendError: torch does not find the device.
    """
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:  # torch asserts if built without CUDA
        raise BackendError(
            f"torch {torch.__version__} cannot use '{device}': {str(error).splitlines()[0]}",
            where=f"--device {device}",
            fix="--device cpu; minillm doctor says what this machine can run",
        ) from error
    return TorchCalls(device)


class TorchCalls:
    """Calls of kernels on a device of torch; see :class:`minillm_kit.kernels.calls.Calls`."""

    backend = "torch"

    def __init__(self, device: str) -> None:
        self.device, self.kind = device, kind_of("torch", device)

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
        placed = _Placed(self.device, layout)
        given = {
            name: placed.put(name, value, dtype if name in floats else None)
            for name, value in arguments.items()
        }
        for name in wanted:
            given[name].requires_grad_()
        with (
            torch.set_grad_enabled(bool(wanted)),
            _no_limit(),
            _unread() if unread else nullcontext(),
        ):
            outputs = listed(kernel(**given), Tensor)
        attached = [index for index, y in enumerate(outputs) if y.requires_grad]
        pairs = [
            (y, c)
            for y, c in zip(outputs, upstream, strict=False)
            if y.requires_grad and c.shape in ((), y.shape)  # the caller rejects other shapes
        ]
        ups = [
            placed.upstream(f"the upstream gradient {i}", y, c) for i, (y, c) in enumerate(pairs)
        ]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            inputs = [given[name] for name in wanted]
            with _unread() if unread else nullcontext():
                found = torch.autograd.grad([y for y, _ in pairs], inputs, ups, allow_unused=True)
        gradients = {
            name: np.zeros(given[name].shape) if grad is None else _wide(grad)
            for name, grad in zip(wanted, found, strict=True)
        }
        return Results(
            [_wide(y) for y in outputs],
            [str(y.dtype).removeprefix("torch.") for y in outputs],
            gradients,
            placed.written(),
            attached,
        )

    def poison(self, shapes: Sequence[tuple[int, ...]], dtype: str) -> None:
        kinds = {getattr(torch, dtype), torch.float32}
        held = [
            torch.full(shape, torch.nan, dtype=kind, device=self.device)
            for shape in shapes
            for kind in kinds
        ]
        if self.kind == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # an earlier kernel's fault is reported here at the latest
        del held

    @contextmanager
    def uninitialised(self) -> Iterator[None]:
        # only its deterministic mode makes torch fill the memory of torch.empty
        before = torch.are_deterministic_algorithms_enabled()
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from nondeterministic kernels
                yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)

    def compilations(self) -> int:
        dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds
        return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0

    def timed(
        self,
        kernel: Kernel,
        arguments: Mapping[str, Any],
        floats: Sequence[str],
        *,
        dtype: str,
        wanted: Sequence[str] = (),
    ) -> TorchTimed:
        given = {
            name: _plain(value, self.device, dtype if name in floats else None)
            for name, value in arguments.items()
        }
        inputs = [given[name].requires_grad_() for name in wanted]

        def forward() -> None:
            with torch.no_grad():
                kernel(**given)

        def both() -> None:
            outputs = kernel(**given)
            outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
            learnt = [y for y in outputs if y.requires_grad]
            torch.autograd.grad(learnt, inputs, [torch.ones_like(y) for y in learnt])

        return TorchTimed(both if wanted else forward, self.device)

    def product(self, n: int, dtype: str) -> TorchTimed:
        kind = {"dtype": getattr(torch, dtype), "device": self.device}
        a, b = torch.rand(n, n, **kind), torch.rand(n, n, **kind)
        return TorchTimed(lambda: a @ b, self.device)

    def copy(self, size: int) -> TorchTimed:
        a, b = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return TorchTimed(lambda: a.copy_(b), self.device)

    def out_of_memory(self, error: BaseException) -> bool:
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        return known or "DefaultCPUAllocator" in str(error)  # on a CPU torch raises RuntimeError


class _Unread(TorchDispatchMode):
    """Refuses ``.item()``, ``float()``, ``bool()`` and ``if`` of a tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostRead
        return func(*args, **(kwargs or {}))


class TorchTimed:
    """A timed call on torch, using CUDA events where available."""

    def __init__(self, call: Callable[[], object], device: str) -> None:
        self._call, self._device = call, torch.device(device)

    def seconds(self, times: int) -> float:
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self._device)
            begin.record()
            for _ in range(times):
                self._call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / times
        self._wait()
        began = time.perf_counter()
        for _ in range(times):
            self._call()
        self._wait()
        return (time.perf_counter() - began) / times

    def extra_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None  # torch counts only CUDA memory
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._call()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def _wait(self) -> None:
        if self._device.type == "mps":
            torch.mps.synchronize()


class _Placed:
    """Arrays on the device, each inside a larger buffer, and the buffers' initial contents."""

    def __init__(self, device: str, layout: Layout) -> None:
        self._device, self._layout = device, layout
        self._kept: list[tuple[str, Tensor, Tensor]] = []  # name, buffer, values before the call

    def put(self, name: str, value: Any, dtype: str | None) -> Any:
        if isinstance(value, np.ndarray):
            x = torch.from_numpy(value)
            x = x.to(self._device, getattr(torch, dtype) if dtype else x.dtype)
            return self._within(name, x, self._layout if dtype else "plain")
        if hasattr(value, "_fields"):
            parts = zip(value._fields, value, strict=True)
            return type(value)(*(self.put(f"{name}.{part}", x, None) for part, x in parts))
        return value

    def upstream(self, name: str, y: Tensor, value: np.ndarray) -> Tensor:
        c = torch.from_numpy(value).to(self._device, y.dtype)
        if c.shape != y.shape:
            return c.expand(y.shape)
        layout: Layout = "transposed" if self._layout == "transposed" else "plain"
        return self._within(name, c, layout)

    def written(self) -> list[str]:
        return [name for name, now, before in self._kept if not _same(now, before)]

    def _within(self, name: str, x: Tensor, layout: Layout) -> Tensor:
        if x.ndim < 2 or layout == "plain":
            size = x.numel()
            buffer = _around(x, (size + 2 * GUARD,))
            view = buffer[GUARD : GUARD + size].view(x.shape)
        elif layout == "sliced":
            buffer = _around(x, (*x.shape[:-1], x.shape[-1] + GAP))
            view = buffer[..., : x.shape[-1]]
        else:
            buffer = _around(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]))
            view = buffer.transpose(-1, -2)
        view.copy_(x)
        self._kept.append((name, buffer, buffer.clone()))
        return view


def _no_limit() -> AbstractContextManager[None]:
    """Lift the recompile limit for kernels that compile themselves: after 8, torch would run them uncompiled."""
    config = sys.modules.get("torch._dynamo.config")
    return (
        config.patch(recompile_limit=256, accumulated_recompile_limit=4096)
        if config
        else nullcontext()
    )


@contextmanager
def _unread() -> Iterator[None]:
    """Refuse reads of numbers of tensors; kernels that compile themselves run uncompiled, as torch requires here."""
    compiling = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiling else nullcontext(), _Unread():
        yield


def _plain(value: Any, device: str, dtype: str | None) -> Any:
    if isinstance(value, np.ndarray):
        x = torch.from_numpy(value)
        return x.to(device, getattr(torch, dtype) if dtype else x.dtype)
    if hasattr(value, "_fields"):
        return type(value)(*(_plain(x, device, None) for x in value))
    return value


def _around(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.full(shape, torch.nan if x.is_floating_point() else 0).to(x.device, x.dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _wide(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
