"""Weights divided among the processes of torch, by its FSDP2, for models that do not fit whole.

Each rank has some rows of every parameter, in float32: the masters. FSDP2 gathers those of a layer, in the
compute dtype, before the layer is computed, and again in the backward pass, and adds its gradients up and
scatters them as soon as they are there. Parameters outside layers (embedding, head) are gathered once a
micro-batch. P numbers on n ranks are 16 P / n bytes with AdamW's state and the summed gradients, and a
layer's. In M micro-batches a rank sends, of weights in bfloat16,

    all-gathers of weights          4 M (n - 1) / n P bytes, of what is outside layers half of that
    reduce-scatters of gradients    4 M (n - 1) / n P bytes: float32, after each micro-batch, since sums of
                                    whole gradients would take 4 P bytes

What a stage needs whole (Muon) has an owner besides, with its state: rows of gradients go there in all-to-alls
of a few parameters each, and rows of the new values come back.
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
from minillm_mesh.saves import Saves
from minillm_mesh.torch_share import Divided


class TorchWeights(Divided):
    """One rank's share of weights and updates: see :class:`minillm_core.backends.torch.share.Share`.

    Args:
        groups: key -> group, of all that is updated.
        weights: masters, and parameters in the compute dtype, which become this rank's rows.
        model: materialised, or with parameters on torch's meta device, of which rows are made without
            values; its layers and itself become FSDP's modules.
        ranks: the processes.
        saves: writes checkpoints, beside other ranks.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        weights: Any,
        model: Any,
        ranks: Ranks,
        saves: Saves,
    ) -> None:
        rank, size = ranks.rank, ranks.size
        shapes = {name: tuple(p.shape) for name, p in weights.parameters.items()}
        device = torch.device(ranks.device or "cpu")
        self.dtype = next(iter(weights.parameters.values())).dtype
        self.ranks, self.model, self.blocks = ranks, model, [*model.layers]
        self.sharded = _sharded(model, self.blocks, weights, device, self.dtype, size)
        # this rank's rows, float32, in FSDP's memory
        self.rows = {name: one.detach().to_local() for name, one in self.sharded.items()}
        weights.parameters.update((name, Rows(rows)) for name, rows in self.rows.items())
        trained = [name for name, one in self.sharded.items() if one.requires_grad]
        weights.trained.update((name, weights.parameters[name]) for name in trained)
        weights.narrow = False  # parameters are the masters
        updated = layout(groups.values(), size, weights=True)
        others = shapes.keys() - {part.name for those in updated for part in those}
        frozen = [name for name in shapes if name in others]
        parts = tuple(
            (*those, *filter(None, (row_part(name, shapes[name], at, size) for name in frozen)))
            for at, those in enumerate(updated)
        )
        super().__init__(groups, parts, shapes, rank, device, saves)
        self.exchange = Exchange(_owners(groups, updated), shapes, rank, size, device)
        self.open = self.helping = (
            False  # weights are lent at the moment; this rank gathers for others
        )
        self.running: Mapping[int, Callable[..., Any]] = {}  # compiled blocks of the micro-batch
        for number, block in enumerate(self.blocks):
            # before FSDP's own hook, which gathers
            block.register_forward_pre_hook(self._announced(number + 1), prepend=True)

    def masters(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take rows where they are updated; make what this rank owns whole, without its values."""
        owners = self.exchange.owners
        mine = {
            name: torch.zeros_like(master, device=self.device)
            for name, master in whole.items()
            if owners.get(name) == self.rank
        }
        return mine | {
            name: rows for name, rows in self.rows.items() if name not in owners and len(rows)
        }

    def compiler(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Compile each layer by itself: FSDP's hooks between them are Python."""

        def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            blocks = {
                id(block): usual(own_code(_forward_of(block)), **options) for block in self.blocks
            }

            def run(*arguments: Any) -> Any:
                self.running = blocks
                try:
                    return function(*arguments)
                finally:
                    self.running = {}

            return run

        for block in self.blocks:
            vars(block)["forward"] = self._dispatch(block, block.forward)
        return compiled

    def _dispatch(self, block: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            return self.running.get(id(block), eager)(*arguments, **named)

        return forward

    def accumulate(self, objective: Tensor, *, first: bool) -> None:
        """Run the backward pass: FSDP adds gradients up over all ranks, and to those of this rank's rows."""
        if first:
            self._drop()
        with met():
            objective.backward()

    def warm(self, objective: Tensor) -> None:
        """Run the backward pass between others."""
        held = {name: one.grad for name, one in self.sharded.items()}
        self.accumulate(objective, first=True)
        for name, one in self.sharded.items():
            one.grad = held[name]

    def _drop(self) -> None:
        for one in self.sharded.values():
            one.grad = None

    @torch.no_grad()
    def scattered(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's parts; those that it owns whole are brought together."""
        found = {}
        for name, one in self.sharded.items():
            if one.requires_grad:  # a stage may leave a parameter out: zeros
                found[name] = (
                    torch.zeros_like(self.rows[name]) if one.grad is None else one.grad.to_local()
                )
        self._drop()
        whole = self.exchange.collected({name: found.pop(name) for name in self.exchange.owners})
        return {name: grad for name, grad in found.items() if len(grad)} | whole

    @torch.no_grad()
    def gather(self, masters: Mapping[str, Tensor]) -> None:
        """Write the masters that ranks own whole into the rows of all; FSDP gathers them when they are used."""
        for name, rows in self.exchange.handed_out(masters, self.exchange.owners, self.dtype):
            self.rows[name].copy_(rows)

    def spread(self, tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's rows of what the owners have of a kind, by parameter."""
        names = [
            n.removeprefix(kind)
            for those in self.held
            for one in those
            if (n := one.name).startswith(kind)
        ]
        given = {name.removeprefix(kind): tensor for name, tensor in tensors.items()}
        return self.exchange.handed_out(given, names, torch.float32)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let ranks compute without gradients, each at its own pace: what one of them needs all gather.

        They say before each layer which they are about to compute; one that is done helps to gather
        those of the others until all are done.
        """
        if self.open:  # by a rank that computes alone, once for all that it does
            yield
            return
        self.open = True
        self.model.unshard()
        try:
            yield
        except BaseException:
            if reset := getattr(
                self.model, "reset_iter_state", None
            ):  # torch 2.13: of a layer that failed
                reset()
                self.model.unshard()
            raise
        finally:
            while wanted := self._wanted(0):
                self._help(self.blocks[wanted - 1])
            self.model.reshard()
            self.open = False

    @torch.no_grad()
    def _help(self, block: Any) -> None:
        """Gather a layer for other ranks, by FSDP's own hooks: it has the same order of layers on all."""
        self.running, self.helping = {id(block): lambda x: x}, True
        block(torch.zeros(()))
        self.running, self.helping = {}, False

    def _announced(self, number: int) -> Callable[..., None]:
        def hook(block: Any, arguments: Any) -> None:
            if self.open and not self.helping:
                self._wanted(number)

        return hook

    def _wanted(self, number: int) -> int:
        """Say which layer this rank is about to compute, from 1; return that of those that compute, 0: none."""
        return int(max(wanted for (wanted,) in self.ranks.gathered([number])))


class Rows:
    """This rank's rows of a parameter, whose ``data`` are read and set as a parameter's are; their place is FSDP's.

    Args:
        rows: float32, in FSDP's memory.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.dtype = rows, rows.dtype

    @property
    def data(self) -> Tensor:
        """A copy of the numbers."""
        return self._rows.clone()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._rows.copy_(value)


class Exchange:
    """Rows of parameters to their owners, and back: all-to-alls of a few parameters each.

    Args:
        owners: parameter -> the rank that updates it whole.
        shapes: parameter -> its shape.
        rank: of this process.
        size: how many there are.
        device: where the arrays are.
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

    def collected(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send this rank's rows to the owners; return what it owns itself, whole.

        Args:
            rows: of every parameter that is owned, float32.
        """
        found = {}
        for by_owner in self._buckets(self.owners):
            sent = [[rows[name] for name in names] for names in by_owner]
            mine = by_owner[self.rank]
            due = [[self._part(name, at) for name in mine] for at in range(self.size)]
            received = self._exchanged(sent, due, torch.float32)
            found.update(zip(mine, map(torch.cat, zip(*received, strict=True)), strict=True))
        return found

    def handed_out(
        self, whole: Mapping[str, Tensor], names: Iterable[str], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Send what this rank owns of some parameters to all; yield this rank's rows of each.

        Args:
            whole: what this rank owns.
            names: parameters of any owner.
            dtype: in which numbers are sent.
        """
        for by_owner in self._buckets(names):
            sent = [
                [whole[name].narrow(0, *self._rows(name, at)) for name in by_owner[self.rank]]
                for at in range(self.size)
            ]
            due = [[self._part(name, self.rank) for name in names] for names in by_owner]
            for names, received in zip(by_owner, self._exchanged(sent, due, dtype), strict=True):
                yield from zip(names, received, strict=True)

    def _exchanged(
        self,
        sent: Sequence[Sequence[Tensor]],
        due: Sequence[Sequence[tuple[int, ...]]],
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Send arrays to each rank; return those that come from each, of shapes ``due``."""
        leaving = [sum(one.numel() for one in those) for those in sent]
        coming = [sum(map(prod, those)) for those in due]
        flat = torch.empty(sum(leaving), dtype=dtype, device=self.device)
        ends = flat.split([one.numel() for those in sent for one in those])
        for place, one in zip(ends, (one for those in sent for one in those), strict=True):
            place.view(one.shape).copy_(one)
        into = torch.empty(sum(coming), dtype=dtype, device=self.device)
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
        """Yield names by owner, a bucket's bytes on a rank at a time; each has some of every owner's."""
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
    blocks: Sequence[Any],
    weights: Any,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
) -> dict[str, Any]:
    """Let FSDP divide a model by rows; return its parameters, float32, by name."""
    mesh = init_device_mesh(device.type, (size,))
    narrow = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
    with torch.no_grad():
        for name, parameter in weights.parameters.items():
            master = weights.masters[name]
            parameter.data = master if master.is_meta else master.to(device)
    for dictionary in (weights.parameters, weights.trained):
        dictionary.clear()  # FSDP's are others, and whole ones would stay
    for one in (*blocks, model):
        fully_shard(one, mesh=mesh, mp_policy=policy)
        one.set_gradient_divide_factor(1.0)  # a loss is a sum over all, divided by the count of all
        one.set_force_sum_reduction_for_comms(True)
    # rows of what is on the meta device; _apply is how Module.to and to_empty reach FSDP's parameters
    model._apply(lambda one: torch.zeros_like(one, device=device) if one.is_meta else one)
    # else the first layer that is evaluated would be taken for the root
    model._get_fsdp_state()._lazy_init()
    return dict(model.named_parameters())


def _owners(groups: Mapping[str, Group], updated: Layout) -> dict[str, int]:
    """Return who owns what is updated whole."""
    names = uncut(groups.values())
    return {p.name: rank for rank, those in enumerate(updated) for p in those if p.name in names}


def _forward_of(block: Any) -> Callable[..., Any]:
    """Make a function of a block, of which torch compiles one graph."""

    def forward(*arguments: Any, **named: Any) -> Any:
        return type(block).forward(block, *arguments, **named)

    return forward


__all__ = ["Exchange", "TorchWeights"]
