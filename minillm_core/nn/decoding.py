"""Decoding: the same forward pass over the columns that follow others.

A node sees the new columns of each argument behind as many earlier ones as it looks back on; what
it gives for those is dropped. Attention keeps keys and values as the kernel takes them, rotated
and laid out. Nothing else of the past is needed, and nothing is computed by a second code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from minillm_core.errors import PlanError, PluginCodeError
from minillm_core.nn.attention import Attention, Call, Layout
from minillm_core.nn.node import Scope

__all__ = ["EVERYTHING", "Continued", "Past", "check_lookbacks"]

EVERYTHING = sys.maxsize
"""``lookback`` of a node that needs every earlier column, such as an attention of its own."""


class Past:
    """What is kept of one sequence: by path, the latest columns of what was seen there."""

    def __init__(self) -> None:
        self.columns = 0
        self.rows = self.new = 0  # B and T of the feed that is under way
        self.kept: dict[str, list[Any]] = {}
        self.fresh: dict[str, list[Any]] = {}  # takes the place of kept once the feed is through

    def scope(self, reads: dict[str, Any]) -> Continued:
        """The scope of a model that is given the next columns, ``ids`` (B, T) among them."""
        (self.rows, self.new), self.fresh = reads["ids"].shape, {}
        return Continued(reads, self)

    def commit(self) -> None:
        """The feed is through: what it saw is the past now."""
        self.columns, self.kept = self.columns + self.new, self.fresh

    def joined(
        self, ops: Any, path: str, values: Iterable[Any], lookback: int, columns: int
    ) -> list[Any]:
        """``values`` behind the earlier columns of the same, and the latest of them kept.

        Args:
            ops: the framework's.
            path: whose they are.
            values: arrays (B, T, ...) are joined, what else there is (numbers, None) stays.
            lookback: how many columns to keep.
            columns: T.
        """
        values = list(values)
        whole = (self.rows, columns)
        timed = [tuple(getattr(value, "shape", ()))[:2] == whole for value in values]
        earlier = self.kept.get(path, [None] * len(values))
        together = [
            ops.concat([old, value], 1) if old is not None and moves else value
            for old, value, moves in zip(earlier, values, timed, strict=True)
        ]
        self.fresh[path] = [
            value[:, max(0, value.shape[1] - lookback) :] if moves else None
            for value, moves in zip(together, timed, strict=True)
        ]
        return together


class Continued(Scope):
    """A scope whose columns follow those of a :class:`Past`."""

    def __init__(self, reads: dict[str, Any], past: Past) -> None:
        super().__init__(reads)
        self.past = past

    def through(self, block: Any, x: Any, *, checkpointing: bool) -> tuple[Any, ...]:
        """A block, whose nodes look back as well; there is no backward pass to recompute for."""
        reads = {name: self.reads[name] for name in block.inputs}
        return block.within(x, Continued(reads, self.past))

    def apply(self, node: Any, own: dict[str, Any]) -> Any:
        """``node.forward`` over what it looks back on and the new columns; gives the new ones."""
        if not node.lookback:
            return super().apply(node, own)
        names, past = self.reads | own, self.past
        given = (names[name] for name in node.bound)
        result = self.receive(
            node, node(*past.joined(node.ops, node.path, given, node.lookback, past.new))
        )
        earlier = min(node.lookback, past.columns)
        if isinstance(result, (tuple, list)):
            return tuple(latest(node, y, earlier, past.new) for y in result)
        return latest(node, result, earlier, past.new)

    def positions(self, ops: Any) -> Any:
        """int32 (T,): counted from the sequence's start."""
        return ops.arange(self.past.columns + self.past.new)[self.past.columns :]

    def attended(self, attention: Attention, call: Call) -> Call:
        """The call with the keys, values and documents of all columns, as the layout left them.

        Raises:
            PluginCodeError: a layout made another number of positions than it declares.
        """
        columns = self.past.new * attention.stretch
        if attention.layout is not None and (made := call.k.shape[1]) != columns:
            raise PluginCodeError(
                attention.layout.owner,
                f"{type(attention.layout).__name__}.enter",
                did=f"made {made} positions of {self.past.new} columns in",
                where=attention.layout.path,
                fix=f"it declares stretch = {attention.stretch}: so many positions a column, each "
                "column's after those of the columns before it",
            )
        k, v, documents = self.past.joined(
            attention.ops,
            attention.path,
            (call.k, call.v, call.documents),
            EVERYTHING,
            columns,
        )
        return call._replace(k=k, v=v, documents=documents)


def latest(node: Any, y: Any, earlier: int, columns: int) -> Any:
    """The new columns of what a node gave: y (B, earlier + columns, ...) or (earlier + columns,).

    Raises:
        PluginCodeError: it gave another number of columns.
    """
    shape = tuple(getattr(y, "shape", ()))
    axis = 1 if len(shape) > 1 else 0
    if shape[axis : axis + 1] != (earlier + columns,):
        raise PluginCodeError(
            node.owner,
            f"{type(node).__name__}.forward",
            did=f"was given {earlier + columns} columns and returned shape {shape} from",
            where=node.path,
            fix="a node that looks back returns a column for each one that it is given, (B, T, ...)",
        )
    return y[:, earlier:] if axis else y[earlier:]


def check_lookbacks(modules: Mapping[str, Any]) -> None:
    """``lookback`` stands where it has an effect: on nodes that are fed columns.

    Args:
        modules: of a model, by path.

    Raises:
        PlanError: no whole number, or on a module that nothing feeds earlier columns.
    """
    nodes = {path: module for path, module in modules.items() if hasattr(module, "owner")}
    for path, module in modules.items():
        lookback = module.lookback
        if type(lookback) is not int or lookback < 0:
            raise PlanError(
                f"{type(module).__name__} has lookback = {lookback!r}, no number of columns",
                where=path,
                fix="a whole number from 0 on, or EVERYTHING",
            )
        if not lookback:
            continue
        if isinstance(module, Layout) or path.endswith(".product"):
            raise PlanError(
                f"{type(module).__name__} has lookback = {lookback}, and is given new columns alone",
                where=path,
                fix="layouts and products of leaves work column by column; take another slot",
            )
        node = next((nodes[around] for around in _outwards(path) if around in nodes), None)
        if node is None or node.lookback < lookback:
            raise PlanError(
                f"{type(module).__name__} has lookback = {lookback}, and the node that it is part "
                "of looks back on less",
                where=path,
                fix="declare it in the node's own class, all that its parts need together",
            )


def _outwards(path: str) -> Iterator[str]:
    """A path and those around it, nearest first."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
