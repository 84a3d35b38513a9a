"""Decoding with a KV cache: the training model's own forward pass over only the new columns.

Attention caches keys and values as the kernel takes them, rotated and laid out; with a window only those
within it. A node with a ``lookback`` gets that many cached columns in front of the new columns of each
argument, and its results for the cached ones are dropped. A node that ``keeps`` arrays gets back those of
all earlier columns. Generation has no forward pass of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.attention import Attention, Call, Layout
from minillm_core.nn.node import Scope, unusable

CORE_PATH = ".attention.core"

EVERYTHING = sys.maxsize
"""``lookback`` of a node that needs every earlier column, such as a plugin's own attention."""


class KVCache:
    """A KV cache of the sequences in a batch: by module path, the latest columns of the module's arguments."""

    def __init__(self) -> None:
        self.columns = 0
        self.rows = self.new = 0  # B and T of the current pass
        self.kept: dict[str, list[Any]] = {}
        self.fresh: dict[str, list[Any]] = {}  # replaces kept when the pass is committed

    def scope(self, reads: dict[str, Any]) -> CachedScope:
        """Return the scope of a pass over the next columns, ``ids`` (B, T) among them."""
        (self.rows, self.new), self.fresh = reads["ids"].shape, {}
        return CachedScope(reads, self)

    def commit(self) -> None:
        """Commit this pass: append its columns to the KV cache."""
        self.columns, self.kept = self.columns + self.new, self.fresh

    def append(
        self, ops: Any, path: str, values: Iterable[Any], lookback: int, columns: int
    ) -> list[Any]:
        """Append ``values`` to their cached columns, and cache the latest of both.

        Args:
            ops: the framework's array functions.
            path: the path of the module whose arguments they are.
            values: arrays (B, T, ...) are appended; any other value (number, None) stays unchanged.
            lookback: how many columns to cache.
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


class CachedScope(Scope):
    """The scope of columns that follow those in a :class:`KVCache`."""

    def __init__(self, reads: dict[str, Any], cache: KVCache, turn: int = 0) -> None:
        super().__init__(reads)
        self.cache, self.turn = cache, turn

    def key(self, module: Any) -> str:
        """Return the cache key of a module's columns: its path, and the turn of a block that runs again."""
        return f"{module.path}@{self.turn}" if self.turn else module.path

    def run_block(
        self, block: Any, x: Any, *, checkpointing: bool, turn: int = 0
    ) -> tuple[Any, ...]:
        """Run a block on the same cache; ``checkpointing`` has no effect, since there is no backward pass."""
        reads = [self.reads[name] for name in block.inputs]
        return block(x, *reads, scope_of=lambda given: CachedScope(given, self.cache, turn))

    def apply(self, node: Any, own: dict[str, Any], like: tuple[str, ...] = ()) -> Any:
        """Run ``node.forward`` on its cached and new columns; return its results for the new ones."""
        if not node.lookback:
            result = super().apply(node, own, like)
            self.keep(node)
            return result
        names, cache = self.reads | own, self.cache
        given = (names[name] for name in node.bound)
        result = self.split_emitted(
            node, node(*cache.append(node.ops, self.key(node), given, node.lookback, cache.new))
        )
        earlier = min(node.lookback, cache.columns)
        if isinstance(result, (tuple, list)):
            return tuple(latest(node, y, earlier, cache.new) for y in result)
        return latest(node, result, earlier, cache.new)

    def kept(self, node: Any) -> dict[str, Any]:
        """Return the arrays that a node kept of the cached columns, by name; each None if no column is cached."""
        held = self.cache.kept.get(self.key(node), [None] * len(node.keeps))
        return dict(zip(node.keeps, held, strict=True)) if node.keeps else {}

    def keep(self, node: Any) -> None:
        """Append the arrays that a node keeps of the new columns.

        Raises:
            PluginCodeError: an array has another shape than the new columns.
        """
        if not node.keeps:
            return
        new = {name: self.emitted[f"{node.path}.{name}"] for name in node.keeps}
        columns = (self.cache.rows, self.cache.new)
        for name, value in new.items():
            if name not in node.recurrent and tuple(value.shape[:2]) != columns:
                did = f"returned shape {tuple(value.shape)} as '{name}' from"
                fix = f"return the array of the new columns only, {columns} and so on"
                raise unusable(node, did, fix)
        appended = [None if name in node.recurrent else value for name, value in new.items()]
        self.cache.append(node.ops, self.key(node), appended, EVERYTHING, self.cache.new)
        kept = self.cache.fresh[self.key(node)]
        for index, name in enumerate(new):
            if name in node.recurrent:
                kept[index] = new[name]

    def columns(self, node: Any, documents: Any) -> Any:
        """Append the documents of the new columns to those cached; a node with a lookback already has them."""
        if node.lookback:
            return documents
        place, new = f"{self.key(node)}.documents", self.cache.new
        return self.cache.append(node.ops, place, (documents,), EVERYTHING, new)[0]

    def positions(self, ops: Any) -> Any:
        """Return the new columns' positions from the sequence's start, int32 (T,)."""
        return ops.arange(self.cache.columns + self.cache.new)[self.cache.columns :]

    def attend(self, attention: Attention, call: Call, x: Any) -> Any:
        """Attend to the keys, values and documents of all columns, cached and new, that the new ones may see.

        With a window only the keys within it are cached, unless a plugin's core keeps arrays of its own
        beside them, which cover all columns.

        Raises:
            PluginCodeError: a layout returned another number of positions than it declares.
        """
        columns, keeps = self.cache.new * attention.stretch, attention.core and attention.core.keeps
        if attention.layout is not None and (made := call.k.shape[1]) != columns:
            did = f"made {made} positions of {self.cache.new} columns in"
            fix = (
                f"return stretch = {attention.stretch} positions per column, as the class declares, "
                "in the order of the columns"
            )
            raise unusable(attention.layout, did, fix, "enter")
        k, v, documents = self.cache.append(
            attention.ops,
            self.key(attention),
            (call.k, call.v, call.documents),
            call.window - 1 if isinstance(call.window, int) and not keeps else EVERYTHING,
            columns,
        )
        return attention.attended(call._replace(k=k, v=v, documents=documents), x, self)


def latest(node: Any, y: Any, earlier: int, columns: int) -> Any:
    """Return a node's result y for the new columns; y is (B, earlier + columns, ...), or 1-d.

    Raises:
        PluginCodeError: y has another number of columns.
    """
    shape = tuple(getattr(y, "shape", ()))
    axis = 1 if len(shape) > 1 else 0
    if shape[axis : axis + 1] != (earlier + columns,):
        did = f"was given {earlier + columns} columns and returned shape {shape} from"
        fix = "a node that looks back returns one column for each of its input, (B, T, ...)"
        raise unusable(node, did, fix)
    return y[:, earlier:] if axis else y[earlier:]


def check_lookbacks(modules: Mapping[str, Any]) -> None:
    """Check that only modules that receive earlier columns declare a ``lookback``.

    Args:
        modules: the modules of a model, by path.

    Raises:
        PlanError: a lookback is not a whole number, or its module never receives earlier columns.
    """
    nodes = {path: module for path, module in modules.items() if hasattr(module, "owner")}
    for path, module in modules.items():
        lookback = module.lookback
        node = next((nodes[around] for around in outwards(path) if around in nodes), None)
        if type(lookback) is not int or lookback < 0:
            problem = f"lookback = {lookback!r}, not a number of columns"
            fix = "a whole number from 0 on, or EVERYTHING"
        elif lookback and (isinstance(module, Layout) or path.endswith((".product", CORE_PATH))):
            problem = f"lookback = {lookback}, but receives only new columns"
            fix = "remove it: layouts, products of leaves and cores of attention cannot look back"
        elif lookback and (node is None or node.lookback < lookback):
            problem = f"lookback = {lookback}, but the node that contains it declares less"
            fix = "declare in the node's own class the total that its parts need"
        elif module.keeps and (lookback or isinstance(module, Layout)):
            problem = f"keeps = {module.keeps}, and {'looks back' if lookback else 'is a Layout'}"
            fix = "a node that keeps arrays receives only new columns; a layout cannot keep arrays"
        else:
            continue
        raise PlanError(f"{type(module).__name__} has {problem}", where=path, fix=fix)


def outwards(path: str) -> Iterator[str]:
    """Yield a path and the paths of the modules around it, nearest first."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
