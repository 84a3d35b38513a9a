"""Sharded updates on torch (ZeRO): gradients are summed by their owners, weights all-gathered.

In a step of P parameters on n ranks each rank sends

    gradients of several micro-batches, float32     4 (n - 1) / n P bytes, a reduce-scatter
    gradients of one, in the compute dtype          2 (n - 1) / n P bytes in bfloat16, an all-to-all
    all-gather of weights, in the compute dtype     2 (n - 1) / n P bytes in bfloat16, 4 in float32
    all-reduce of metrics, statistics and norms     a few hundred bytes

where an all-reduce of gradients alone sends 8 (n - 1) / n P. All run over one flat buffer of equal
sections, one per rank. Micro-batches accumulate their gradients in it, in float32; after the reduce-scatter
its memory receives the gathered weights. The gradients of a single micro-batch are sent as the backward pass
computed them, in one half of that memory to the other, and their owner sums them in float32: the same sums
for half of the bytes. Optimizer state and master weights exist on the owner alone.

Gradients are not sent during the backward pass: that is one compiled graph for the whole model, which
returns all gradients at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch import _foreach_add_ as foreach_add_  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_copy_ as foreach_copy_  # pyright: ignore[reportPrivateImportUsage]

from minillm_core.inspection import ROW, Deferred, Group, Snapshot
from minillm_mesh.collectives import all_gather, met, reduce_scatter
from minillm_mesh.layout import BUCKET, Layout, Part, layout
from minillm_mesh.part_writer import PartWriter

ALIGNED = 16
"""Alignment of parts, in elements: 32 bytes in bfloat16, for vectorised kernels."""

MODEL, OPTIMIZER, VIEW = "model.", "optimizer.", "view."


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """An array that one rank holds, under its name in a checkpoint."""

    name: str
    part: Part  # of the parameter that it belongs to
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes, rounded up so that the next array is aligned."""
        return -(-prod(self.shape) * self.dtype.itemsize // 16) * 16


class ShardedArrays:
    """The arrays of a checkpoint, sharded over ranks.

    Args:
        groups: key -> parameter group.
        parts: those that each rank updates; in the same order on all.
        saved: the master weights that each rank saves; None: those that it updates.
        shapes: name -> whole shape of a divided parameter.
        rank: of this process.
        device: of the arrays.
        saves: writes them, together with other ranks.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        parts: Layout,
        shapes: Mapping[str, tuple[int, ...]],
        rank: int,
        device: torch.device,
        saves: PartWriter,
        *,
        saved: Layout | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.shapes = rank, len(parts), device, shapes
        self.saves = saves
        by_rank = [_local(groups, those) for those in parts]
        self.groups = by_rank[rank]
        # by rank
        self.arrays = [_arrays(*one) for one in zip(by_rank, parts, saved or parts, strict=True)]
        self.mine = {one.name: one.part for one in self.arrays[rank]}
        # name -> whole shape and dtype, of all ranks' arrays
        self.known = {
            one.name: (self._whole(one), one.dtype) for those in self.arrays for one in those
        }

    def _whole(self, one: ArrayPart) -> tuple[int, ...]:
        return one.shape if one.part.first is None else self.shapes[one.part.name]

    def part(self, name: str, whole: Any) -> Any:
        """Select this rank's part of an array of a checkpoint; None: it has none.

        Raises:
            ValueError: the array has another shape.
        """
        if name in self.known and (shape := self.known[name][0]) != (got := tuple(whole.shape)):
            raise ValueError(f"{name}: shape {got}, not {shape}")
        if (part := self.mine.get(name)) is not None:
            return part.of(whole)
        return None if name.removeprefix(MODEL) in self.shapes else whole

    def placeholders(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return whole arrays as deferred placeholders, so that only this rank's parts are read."""

        def own(name: str) -> Callable[[int, int], np.ndarray]:
            return lambda first, count: np.atleast_1d(tensors[name].numpy(force=True))

        found: dict[str, Any] = {
            name: Deferred(shape, np.dtype(str(dtype).removeprefix("torch.")), own(name))
            for name, (shape, dtype) in self.known.items()
        }
        alike = {name: tensor for name, tensor in tensors.items() if name not in found}
        return found | {name: tensor.numpy(force=True).copy() for name, tensor in alike.items()}

    def gather_kind(self, tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield each rank's arrays of a kind, by parameter."""
        for array, tensor in self._on_all_ranks(tensors, kind):
            yield array.part.name, tensor

    def snapshot(
        self, tensors: Mapping[str, Tensor], take: Callable[[Mapping[str, Tensor]], Snapshot]
    ) -> Snapshot:
        """Take a snapshot of this rank's parts, and on rank 0 of replicated arrays; no rank waits for another."""
        written = {}
        for name, tensor in tensors.items():
            if (part := self.mine.get(name)) is not None:
                written[name if part.first is None else f"{name}{ROW}{part.first}"] = tensor
            elif self.rank == 0:
                written[name] = tensor
        return self.saves.add(take(written))

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Gather the parts of all ranks on rank 0, one bucket on the device at a time."""
        found: dict[str, np.ndarray] = {}
        for array, tensor in self._on_all_ranks(tensors, to_host=self.rank == 0):
            if self.rank == 0 and array.part.first is None:
                found[array.name] = tensor.numpy()
            elif self.rank == 0:
                host = tensor.numpy()
                shape = self.shapes[array.part.name]
                held = found.setdefault(array.name, np.empty(shape, host.dtype))
                array.part.of(held)[...] = host
        if self.rank == 0:
            alike = tensors.keys() - self.mine.keys()
            found |= {name: tensors[name].to("cpu", copy=True).numpy() for name in alike}
        return found

    def _on_all_ranks(
        self, tensors: Mapping[str, Tensor], kind: str = "", *, to_host: bool = False
    ) -> Iterator[tuple[ArrayPart, Tensor]]:
        """Yield every rank's arrays, on all ranks."""
        for owner, arrays in enumerate(self.arrays):
            for bucket in _buckets([one for one in arrays if one.name.startswith(kind)]):
                ends = list(accumulate(one.nbytes for one in bucket))
                buffer = torch.empty(ends[-1], dtype=torch.uint8, device=self.device)
                begins = [0, *ends[:-1]]
                if owner == self.rank:
                    for one, begin in zip(bucket, begins, strict=True):
                        _typed(buffer, begin, one).copy_(tensors[one.name])
                with met():
                    dist.broadcast(buffer, owner)
                buffer = buffer.cpu() if to_host else buffer
                yield from (
                    (one, _typed(buffer, begin, one))
                    for one, begin in zip(bucket, begins, strict=True)
                )


class TorchShare(ShardedArrays):
    """One rank's share of the updates: see :class:`minillm_core.backends.torch.share.Share`.

    Args:
        groups: key -> parameter group.
        parameters: name -> trainable parameter, in the compute dtype.
        rank: of this process.
        size: number of ranks.
        saves: writes checkpoints, together with other ranks.
        compiled: compiles a function of arrays, if the run compiles.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        parameters: Mapping[str, torch.nn.Parameter],
        rank: int,
        size: int,
        saves: PartWriter,
        compiled: Callable[..., Any],
    ) -> None:
        parts: Layout = layout(groups.values(), size)
        self.parameters, first = parameters, next(iter(parameters.values()))
        device, self.dtype = first.device, first.dtype
        shapes = {m.name: m.shape for group in groups.values() for m in group.members}
        super().__init__(groups, parts, shapes, rank, device, saves)
        # one section per rank, and the offset of each part in it
        ends = [[*accumulate(_rounded(part.size) for part in those)] for those in parts]
        section = _rounded(max([1, *(end[-1] for end in ends if end)]))
        self.flat = torch.zeros(size * section, device=device)
        self.reduced = torch.zeros(section, device=device)
        begins = [[0, *end[:-1]] for end in ends]
        order = {name: at for at, name in enumerate(parameters)}
        every = [
            (owner * section + begin, part)
            for owner, those in enumerate(parts)
            for begin, part in zip(begins[owner], those, strict=True)
        ]
        own = list(zip(begins[rank], parts[rank], strict=True))
        self.pieces = [(order[part.name], part) for _, part in every]
        self.sums = [_view(self.flat, begin, part) for begin, part in every]
        self.gradients = {part.name: _view(self.reduced, begin, part) for begin, part in own}
        # weights, and gradients in the compute dtype, are sent in the same memory
        self.single = False  # whether the step has one micro-batch, in 16 bits
        memory, every_section = self.flat.view(self.dtype), self.flat.numel()
        self.received = memory[:every_section]
        self.of_ranks = memory[-every_section:].view(size, section)
        self.sent = self.reduced.view(self.dtype)[:section]
        self.sending = {part.name: _view(self.sent, begin, part) for begin, part in own}
        self.arrived = [_view(self.received, begin, part) for begin, part in every]
        self.copies = [part.of(parameters[part.name].data) for _, part in every]
        # torch.sum reads the few rows of 16-bit numbers at half the speed of a compiled sum
        self.sum_ranks = compiled(_sum) if device.type == "cuda" else _sum

    def masters(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep this rank's parts of the master weights, and those that no rank updates."""
        parts = {name: self.part(f"{MODEL}{name}", master) for name, master in whole.items()}
        narrow = self.dtype != torch.float32  # else a master is the parameter's own memory
        return {
            name: part.clone() if narrow and name in self.parameters else part
            for name, part in parts.items()
            if part is not None
        }

    def held(self, masters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the master weights: this rank saves those that it updates."""
        return masters

    def compiler(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a micro-batch as one graph."""
        return usual

    def accumulate(self, objective: Tensor, *, first: bool, last: bool) -> None:
        """Accumulate a micro-batch's gradients in the flat buffer, cut into the parts of all ranks."""
        fresh = self._gradients(objective)
        self.single = first and last and self.dtype != torch.float32
        with torch.no_grad():
            cut = [part.of(fresh[at]) for at, part in self.pieces]
            if self.single:
                foreach_copy_(self.arrived, cut)
            else:
                (foreach_copy_ if first else foreach_add_)(self.sums, cut)

    def warm(self, objective: Tensor) -> None:
        """Run the backward pass without accumulating."""
        self._gradients(objective)

    def _gradients(self, objective: Tensor) -> tuple[Tensor, ...]:
        # zeros if a stage leaves a parameter out
        parameters = [*self.parameters.values()]
        return torch.autograd.grad(objective, parameters, materialize_grads=True)

    def inference_context(self) -> AbstractContextManager[None]:
        """Return an empty context: every rank already has all weights."""
        return nullcontext()

    def reduce_scatter(self) -> dict[str, Tensor]:
        """Sum this rank's gradients over all; return them, in memory that the next step overwrites."""
        with met():
            if self.single:
                dist.all_to_all_single(self.of_ranks, self.received.view_as(self.of_ranks))
                self.sum_ranks(self.of_ranks, self.reduced)
            else:
                reduce_scatter(self.reduced, self.flat)
        return dict(self.gradients)

    @torch.no_grad()
    def all_gather(self, masters: Mapping[str, Tensor]) -> None:
        """All-gather every rank's master weights into the parameters."""
        if self.sending:  # a rank without parts has none
            foreach_copy_([*self.sending.values()], [masters[name] for name in self.sending])
        with met():
            all_gather(self.received, self.sent)
        foreach_copy_(self.copies, self.arrived)


def _sum(of_ranks: Tensor, out: Tensor) -> None:
    """Sum the gradients of each rank, (ranks, n), in float32 into ``out`` (n,)."""
    torch.sum(of_ranks, 0, dtype=torch.float32, out=out)


def _local(groups: Mapping[str, Group], parts: Sequence[Part]) -> dict[str, Group]:
    """Return one rank's parts as parameter groups."""
    shapes = {part.name: part.shape for part in parts}
    found = {}
    for key, group in groups.items():
        members = [replace(m, shape=shapes[m.name]) for m in group.members if m.name in shapes]
        if members:
            found[key] = replace(group, members=tuple(members))
    return found


def _arrays(
    groups: Mapping[str, Group], parts: Sequence[Part], saved: Sequence[Part]
) -> list[ArrayPart]:
    """List the arrays of a rank: master weights, and the views and optimizer state of its updates."""
    by_name = {part.name: part for part in parts}
    found = [ArrayPart(f"{MODEL}{part.name}", part, part.shape, torch.float32) for part in saved]
    for group in groups.values():
        for member in group.members:
            part = by_name[member.name]
            if member.view:
                found.append(ArrayPart(f"{VIEW}{member.name}", part, part.shape, torch.float32))
            for anchor, entries in group.state_arrays().items():
                for entry, kept in entries.items():
                    name = f"{OPTIMIZER}{anchor}.{entry}.{member.name}"
                    shape = kept.shape[1:] if group.rule.stacked else kept.shape
                    # NumPy has no bfloat16: a checkpoint holds its bits
                    kind = "int16" if kept.dtype == "bfloat16" else kept.dtype
                    found.append(ArrayPart(name, part, shape, getattr(torch, kind)))
    return found


def _buckets(arrays: Sequence[ArrayPart]) -> Iterator[list[ArrayPart]]:
    """Yield buckets of arrays in order, combining small ones."""
    bucket: list[ArrayPart] = []
    held = 0
    for one in arrays:
        if bucket and held + one.nbytes > BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append(one)
        held += one.nbytes
    if bucket:
        yield bucket


def _typed(buffer: Tensor, begin: int, one: ArrayPart) -> Tensor:
    """View the bytes from ``begin`` as an array."""
    size = prod(one.shape) * one.dtype.itemsize
    return buffer[begin : begin + size].view(one.dtype).view(one.shape)


def _view(flat: Tensor, begin: int, part: Part) -> Tensor:
    return flat[begin : begin + part.size].view(part.shape)


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


__all__ = ["ShardedArrays", "TorchShare"]
