"""Sharded weights on torch, by FSDP2, for models that do not fit on one card.

Each rank holds some rows of every parameter, in float32: the master weights. FSDP2 all-gathers those of a
unit of ``mesh.unit`` layers, in the compute dtype, before its first layer is computed, and again in the
backward pass, and reduce-scatters its gradients as soon as they exist. Parameters outside layers (embedding,
head) are gathered once per step. P parameters on n ranks take 16 P / n bytes with AdamW's state and the
accumulated gradients, plus those of one unit. In M micro-batches a rank sends, with weights in bfloat16,

    all-gathers of weights          4 M (n - 1) / n P bytes; 2 (n - 1) / n of parameters outside layers
    reduce-scatters of gradients    4 M (n - 1) / n P bytes: float32, after each micro-batch, since sums of
                                    unsharded gradients would take 4 P bytes

A parameter whose update needs the whole matrix (Muon) also has an owner, with its optimizer state: rows of
gradients and of master weights are sent there in all-to-alls of a few parameters each, and rows of the new
values are sent back, all in float32: 12 (n - 1) / n^2 bytes per element and rank. The whole master weights
have memory only during the update, when activations have none, unless a view (EMA) is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from minillm_core.inspection import Group, Ranks, own_code
from minillm_mesh.collectives import met
from minillm_mesh.layout import BUCKET, Layout, layout, row_part, rows_of, uncut
from minillm_mesh.part_writer import PartWriter
from minillm_mesh.torch_share import ShardedArrays


class TorchWeights(ShardedArrays):
    """One rank's share of weights and updates: see :class:`minillm_core.backends.torch.share.Share`.

    Args:
        groups: key -> parameter group.
        weights: master weights, and parameters in the compute dtype, which this rank's rows replace.
        model: materialised, or with parameters on torch's meta device, whose rows are allocated without
            values; its layers and the model itself become FSDP modules.
        ranks: the processes.
        saves: writes checkpoints, together with other ranks.
        unit: number of layers that are gathered together.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        weights: Any,
        model: Any,
        ranks: Ranks,
        saves: PartWriter,
        unit: int = 1,
    ) -> None:
        rank, size = ranks.rank, ranks.size
        shapes = {name: tuple(p.shape) for name, p in weights.parameters.items()}
        device = torch.device(ranks.device or "cpu")
        self.dtype = next(iter(weights.parameters.values())).dtype
        self.ranks, self.model, self.blocks = ranks, model, [*model.layers]
        self.units = [self.blocks[at : at + unit] for at in range(0, len(self.blocks), unit)]
        self.sharded = _sharded(model, self.units, weights, device, self.dtype, size)
        # this rank's rows, float32, in FSDP's memory
        self.rows = {name: one.detach().to_local() for name, one in self.sharded.items()}
        weights.parameters.update((name, Rows(rows)) for name, rows in self.rows.items())
        trained = [name for name, one in self.sharded.items() if one.requires_grad]
        weights.trained.update((name, weights.parameters[name]) for name in trained)
        weights.narrow = False  # parameters are the masters
        updated = layout(groups.values(), size, weights=True)
        # views are computed from whole masters at any time, and are in their rows during evaluation
        self.keeps = any(member.view for group in groups.values() for member in group.members)
        kept = updated if self.keeps else ((),) * size
        names = {part.name for those in kept for part in those}
        others = [(name, shape) for name, shape in shapes.items() if name not in names]
        saved = tuple(
            (*those, *filter(None, (row_part(*one, at, size) for one in others)))
            for at, those in enumerate(kept)
        )
        super().__init__(groups, updated, shapes, rank, device, saves, saved=saved)
        self.exchange = RowExchange(_owners(groups, updated), shapes, rank, size, device)
        self.weights = weights
        self.updating = False  # from reduce_scatter to all_gather: masters are newer than rows
        # inside inference_context(); after an error there; while this rank only gathers for others
        self.open = self.failed = self.helping = False
        # compiled blocks, by id: those in use, and those of the last forward pass
        self.running: Mapping[int, Callable[..., Any]] = {}
        self.last = self.running
        for number, blocks in enumerate(self.units):
            # before FSDP's own hook, which gathers
            blocks[0].register_forward_pre_hook(self._announced(number + 1), prepend=True)

    def masters(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows as master weights, and zeros for parameters that it owns whole."""
        owners = self.exchange.owners
        mine = {
            name: torch.zeros_like(master, device=self.device)
            for name, master in whole.items()
            if owners.get(name) == self.rank
        }
        return mine | {
            name: rows for name, rows in self.rows.items() if name not in owners and len(rows)
        }

    def held(self, masters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's rows of every parameter; with views, its whole masters and rows of the others."""
        if self.keeps:
            return masters
        return {name: rows for name, rows in self.rows.items() if len(rows)}

    def compiler(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Compile each layer by itself: FSDP's hooks between them are Python."""

        def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            blocks = {
                id(block): usual(own_code(_forward_of(block)), **options) for block in self.blocks
            }

            def run(*arguments: Any) -> Any:
                self.last = blocks
                with self._running(blocks):
                    return function(*arguments)

            return run

        for block in self.blocks:
            vars(block)["forward"] = self._dispatch(block, block.forward)
        return compiled

    @contextmanager
    def _running(self, blocks: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
        """Compute layers with these compiled blocks, all others as they are."""
        self.running = blocks
        try:
            yield
        finally:
            self.running = {}

    def _dispatch(self, block: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            return self.running.get(id(block), eager)(*arguments, **named)

        return forward

    def accumulate(self, objective: Tensor, *, first: bool, last: bool) -> None:
        """Run the backward pass: FSDP reduce-scatters the gradients and accumulates this rank's rows."""
        if first:
            self._drop()
            self._free_masters()
        # those outside layers stay gathered for the next micro-batch
        self.model.set_reshard_after_backward(last, recurse=False)
        # checkpointing computes layers again here, and needs the code of their forward pass
        with self._running(self.last), met():
            objective.backward()

    def warm(self, objective: Tensor) -> None:
        """Run the backward pass without changing the accumulated gradients."""
        held = {name: one.grad for name, one in self.sharded.items()}
        self.accumulate(objective, first=True, last=True)
        for name, one in self.sharded.items():
            one.grad = held[name]

    def _drop(self) -> None:
        for one in self.sharded.values():
            one.grad = None

    @torch.no_grad()
    def reduce_scatter(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's parts: its rows, and whole ones of parameters that it owns.

        The master weights of those are whole until :meth:`all_gather`.
        """
        found = {}
        for name, one in self.sharded.items():
            if one.requires_grad:  # a stage may leave a parameter out: zeros
                found[name] = (
                    torch.zeros_like(self.rows[name]) if one.grad is None else one.grad.to_local()
                )
        self._drop()
        owned = {name: found.pop(name) for name in self.exchange.owners}
        whole = self._stacked()
        for name, grad in self.exchange.to_owners(owned):
            if name in whole:
                whole[name].copy_(grad)
            else:
                whole[name] = grad
        if not self.keeps:
            self._fill_masters()
        self.updating = True
        return {name: grad for name, grad in found.items() if len(grad)} | whole

    @torch.no_grad()
    def all_gather(self, masters: Mapping[str, Tensor]) -> None:
        """Send updated master weights that ranks own whole to the rows of all; FSDP gathers them when used.

        Outside an update the rows are the newer ones, unless whole masters are kept.
        """
        if self.updating or self.keeps:
            for name, rows in self.exchange.from_owners(masters, self.exchange.owners):
                self.rows[name].copy_(rows)
        self.updating = False
        self._free_masters()
        self.model.reshard()  # gathered parameters are those before

    def _stacked(self) -> dict[str, Tensor]:
        """Return empty arrays for the gradients of stacked groups, as parts of one array: updates read that."""
        found = {}
        for group in self.groups.values():
            if group.rule.stacked:
                names = [member.name for member in group.members]
                stack = torch.empty(len(names), *self.shapes[names[0]], device=self.device)
                found.update(zip(names, stack, strict=True))
        return found

    def _whole_masters(self) -> dict[str, Tensor]:
        """Return the master weights that this rank owns whole, which may have no memory."""
        masters, owners = self.weights.masters, self.exchange.owners
        return {name: masters[name] for name, owner in owners.items() if owner == self.rank}

    def _free_masters(self) -> None:
        """Free the memory of whole master weights, unless views are computed from them."""
        for one in () if self.keeps else self._whole_masters().values():
            one.untyped_storage().resize_(0)

    def _fill_masters(self) -> None:
        """Give whole master weights memory, and fill them with the rows of all ranks."""
        whole = self._whole_masters()
        for one in whole.values():  # those of a stacked group share their memory
            memory, base = one.untyped_storage(), one if one._base is None else one._base
            memory.resize_(base.numel() * base.itemsize)
        for name, master in self.exchange.to_owners(
            {n: self.rows[n] for n in self.exchange.owners}
        ):
            whole[name].copy_(master)

    def gather_kind(self, tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's rows of the owners' arrays of a kind, by parameter."""
        names = [
            n.removeprefix(kind)
            for those in self.arrays
            for one in those
            if (n := one.name).startswith(kind)
        ]
        given = {name.removeprefix(kind): tensor for name, tensor in tensors.items()}
        return self.exchange.from_owners(given, names)

    @contextmanager
    def inference_context(self) -> Iterator[None]:
        """Return a context in which ranks compute without gradients, each at its own pace.

        Every all-gather needs all ranks. So a rank announces each unit before computing it, and a rank
        that is done keeps gathering units for the others until all are done.
        """
        outer, self.open = not self.open, True  # nested: a rank that computes alone opens it once
        if outer:
            self.model.unshard()
        try:
            yield
        except BaseException:
            self.failed = True  # also if the caller drops it, as for a sample
            raise
        finally:
            if outer:
                self._leave()

    def _leave(self) -> None:
        """Gather units for the others until all are done."""
        # torch 2.13: after a layer that failed; nothing is gathered again, since the others may go on
        if self.failed and (reset := getattr(self.model, "reset_iter_state", None)):
            reset()
        while wanted := self._announce(0):
            self._help(self.units[wanted - 1])
        self.model.reshard()
        self.open = self.failed = False

    @torch.no_grad()
    def _help(self, blocks: Sequence[Any]) -> None:
        """Gather a unit for other ranks by FSDP's own hooks, so that all ranks see the same order of units."""
        self.helping = True
        with self._running({id(block): lambda x: x for block in blocks}):
            for block in blocks:
                block(torch.zeros(()))
        self.helping = False

    def _announced(self, number: int) -> Callable[..., None]:
        def hook(block: Any, arguments: Any) -> None:
            if self.open and not self.helping:
                self._announce(number)

        return hook

    def _announce(self, number: int) -> int:
        """Announce the unit that this rank computes next, from 1 (0: none); return the highest announced."""
        return int(max(wanted for (wanted,) in self.ranks.all_gather([number])))


class Rows:
    """This rank's rows of a parameter in FSDP's memory, with a parameter's ``data`` attribute.

    Args:
        rows: float32, in FSDP's memory.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.dtype = rows, rows.dtype

    @property
    def data(self) -> Tensor:
        """A copy of the rows."""
        return self._rows.clone()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._rows.copy_(value)


class RowExchange:
    """The exchange of rows with the owners of parameters: all-to-alls of a few parameters each.

    Args:
        owners: parameter -> the rank that updates it whole.
        shapes: parameter -> its shape.
        rank: of this process.
        size: number of ranks.
        device: of the arrays.
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
        rank: int,
        size: int,
        device: torch.device,
    ) -> None:
        self.owners, self.shapes = owners, shapes
        self.rank, self.size, self.device = rank, size, device

    def to_owners(self, rows: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Send this rank's rows to the owners; yield whole arrays of the parameters that it owns.

        Args:
            rows: of every parameter with an owner, float32; removed when sent, which frees their memory.
        """
        for by_owner in self._buckets(self.owners):
            sent = [[rows.pop(name) for name in names] for names in by_owner]
            mine = by_owner[self.rank]
            due = [[self._part(name, at) for name in mine] for at in range(self.size)]
            received = self._exchanged(sent, due)
            yield from zip(mine, map(torch.cat, zip(*received, strict=True)), strict=True)

    def from_owners(
        self, whole: Mapping[str, Tensor], names: Iterable[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Send rows of the parameters that this rank owns to all ranks; yield this rank's rows of each.

        Args:
            whole: the parameters that this rank owns, float32.
            names: parameters of any owner.
        """
        for by_owner in self._buckets(names):
            sent = [
                [whole[name].narrow(0, *self._rows(name, at)) for name in by_owner[self.rank]]
                for at in range(self.size)
            ]
            due = [[self._part(name, self.rank) for name in names] for names in by_owner]
            for names, received in zip(by_owner, self._exchanged(sent, due), strict=True):
                yield from zip(names, received, strict=True)

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], due: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send arrays, float32, to each rank; return those received from each, of shapes ``due``."""
        leaving = [sum(one.numel() for one in those) for those in sent]
        coming = [sum(map(prod, those)) for those in due]
        flat = torch.empty(sum(leaving), device=self.device)
        ends = flat.split([one.numel() for those in sent for one in those])
        for place, one in zip(ends, (one for those in sent for one in those), strict=True):
            place.view(one.shape).copy_(one)
        into = torch.empty(sum(coming), device=self.device)
        with met():
            dist.all_to_all_single(into, flat, coming, leaving)
        return [
            [
                one.view(shape)
                for one, shape in zip(part.split([*map(prod, those)]), those, strict=True)
            ]
            for part, those in zip(into.split(coming), due, strict=True)
        ]

    def _buckets(self, names: Iterable[str]) -> Iterator[list[list[str]]]:
        """Yield buckets of names by owner, of ``BUCKET`` bytes per rank; owners are served evenly."""
        turns = [[name for name in names if self.owners[name] == at] for at in range(self.size)]
        bucket, numbers = [[] for _ in turns], 0
        for turn in zip_longest(*turns):
            for held, name in zip(bucket, turn, strict=True):
                if name is not None:
                    held.append(name)
                    numbers += prod(self.shapes[name])
            if 4 * numbers > BUCKET * self.size:
                yield bucket
                bucket, numbers = [[] for _ in turns], 0
        if numbers:
            yield bucket

    def _rows(self, name: str, rank: int) -> tuple[int, int]:
        return rows_of(self.shapes[name][0], rank, self.size)

    def _part(self, name: str, rank: int) -> tuple[int, ...]:
        return self._rows(name, rank)[1], *self.shapes[name][1:]


def _sharded(
    model: Any,
    units: Sequence[Sequence[Any]],
    weights: Any,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
) -> dict[str, Any]:
    """Shard a model by rows with FSDP, in units of layers; return its parameters, float32, by name."""
    mesh = init_device_mesh(device.type, (size,))
    narrow = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
    with torch.no_grad():
        for name, parameter in weights.parameters.items():
            master = weights.masters[name]
            parameter.data = master if master.is_meta else master.to(device)
    for dictionary in (weights.parameters, weights.trained):
        dictionary.clear()  # FSDP creates its own; these would keep the whole ones alive
    for modules in (*units, [model]):
        one = modules[0]
        fully_shard([*modules] if len(modules) > 1 else one, mesh=mesh, mp_policy=policy)
        one.set_gradient_divide_factor(1.0)  # losses are global sums divided by the global count
        one.set_force_sum_reduction_for_comms(True)
    # allocate rows of meta parameters; Module.to and to_empty also reach FSDP's parameters by _apply
    model._apply(lambda one: torch.zeros_like(one, device=device) if one.is_meta else one)
    # now, else FSDP would treat the first evaluated layer as the root module
    model._get_fsdp_state()._lazy_init()
    return dict(model.named_parameters())


def _owners(groups: Mapping[str, Group], updated: Layout) -> dict[str, int]:
    """Return the owner of each parameter that is updated whole."""
    names = uncut(groups.values())
    return {p.name: rank for rank, those in enumerate(updated) for p in those if p.name in names}


def _forward_of(block: Any) -> Callable[..., Any]:
    """Return a block's forward pass as a function, which torch compiles as one graph."""

    def forward(*arguments: Any, **named: Any) -> Any:
        return type(block).forward(block, *arguments, **named)

    return forward


__all__ = ["RowExchange", "TorchWeights"]
