"""Nodes: modules that plugins put into slots, and the binding of their arguments.

When a plan is built, each argument of a node's ``forward`` is bound to one of the slot's own names
(q, k, x ...) or to a value of the model (a batch field, stream, tap or schedule value) of the same
name, unless ``reads`` of the class names another.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np

from minillm_core.errors import PlanError, PluginCodeError
from minillm_core.nn.module import Module, check_begun, named_modules
from minillm_core.nn.reference import json_arguments, reference_of, resolve
from minillm_core.ops.arrays import dtype_name

MASKING = "attn.documents"
"""Batch entry: the documents for the attention kernel, on the device, or on the host (``host_masks``)."""


@dataclass(frozen=True)
class Setting:
    """A number, or the name of a schedule value that holds it."""

    owner: str
    constant: float | int | None = None
    value: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The schedule value that the setting reads."""
        return () if self.value is None else (self.value,)

    def of(self, reads: Mapping[str, Any]) -> Any:
        """Return the number: a constant of the compiled step, or one of its inputs."""
        return self.constant if self.value is None else reads[self.value]

    def data(self) -> dict[str, Any]:
        """Return the setting as JSON."""
        number = self.constant if self.value is None else {"value": self.value}
        return {"owner": self.owner, "number": number}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model, and a layer index; passed to constructors that name ``geometry``."""

    layers: int
    dim: int  # C
    heads: int  # H
    kv_heads: int  # K; H is a multiple of it
    head_dim: int  # D
    hidden: int  # width inside the MLP
    vocab: int  # V
    positions: int  # length of the longest row; not part of the plan's hash
    layer: int | None = None  # the module's layer; None outside the blocks
    norm_eps: float = 1e-5  # RMSNorm's epsilon, added to the mean square; Llama's


Geometry = ModelShape
"""The former name of :class:`ModelShape`; deprecated, and kept for plugins that use it."""


RESERVED = frozenset(
    {"bound", "framework", "keeps", "leaf", "ops", "owner", "path", "reads", "recurrent"}
    | {"statistics", "terms"}
)
"""Attributes that a node's constructor may not set: they have a meaning in every module."""


@dataclass(frozen=True)
class Node:
    """A module that a plugin put into a slot, as data."""

    name: str  # the child module's name: the plugin's, or plugin.suffix
    owner: str
    reference: str  # module:class
    arguments: tuple[tuple[str, Any], ...] = ()
    reads: tuple[str, ...] = ()  # names of the values that forward gets, in order
    external: tuple[str, ...] = ()  # the names in reads that are not the slot's own
    cls: type | None = field(default=None, compare=False, repr=False)
    slot: str = field(default="", compare=False)  # the slot's name, for messages
    # the names that the slot itself supplies
    own: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The fields, streams, taps and schedule values that the node reads, without its slot's own names."""
        return self.external

    @property
    def plain_form(self) -> type | None:
        """The plain class that the node's class names as ``written_as``; it computes the same from the same parameters."""
        return getattr(self.cls or resolve(self.reference), "written_as", None)

    def make(self, geometry: ModelShape) -> Module:
        """Build the node's module on the current framework.

        Raises:
            PlanError: its constructor, or that of a module in it, does not call ``super().__init__()``,
                or it sets an attribute in ``RESERVED``, or an array or module of torch or MLX.
        """
        cls = self.cls or resolve(self.reference)
        arguments = dict(self.arguments)
        if "geometry" in inspect.signature(cls.__init__).parameters:
            arguments["geometry"] = geometry
        module = cls(**arguments)
        for _, part in named_modules(module):
            check_begun(part)
            for name, value in vars(part).items():
                if _foreign(value):
                    what = f"plugin '{self.owner}': {type(part).__name__}.{name} is a {type(value).__name__}"
                    what += ", which the plan does not know: it would be neither trained nor saved"
                    fix = "Param, Buffer or State for an array, Linear or a Module for a layer"
                    raise PlanError(what, where=self.slot, fix=fix)
        if taken := sorted(RESERVED & set(vars(module))):
            raise PlanError(
                f"plugin '{self.owner}': {cls.__name__} sets self.{taken[0]}, which has a meaning "
                "of its own in every Module",
                where=self.slot,
                fix="give the attribute another name",
            )
        module.bound, module.owner = self.reads, self.owner
        return module

    def data(self) -> dict[str, Any]:
        """Return the node as JSON."""
        return {
            "name": self.name,
            "owner": self.owner,
            "reference": self.reference,
            "arguments": dict(self.arguments),
            "reads": list(self.reads),
        }


def _foreign(value: Any) -> bool:
    """Return whether a value is an array or a module of a framework."""
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    array = hasattr(value, "dtype") and hasattr(value, "shape")
    return not packages.isdisjoint(("torch", "mlx")) and (array or hasattr(value, "parameters"))


def calls_of(node: Node) -> tuple[str, ...]:
    """Return the ops that a node's class declares in ``calls``."""
    return getattr(node.cls or resolve(node.reference), "calls", ())


def call_names(function: Any) -> tuple[str, ...]:
    """Return the argument names of a method, without ``self``.

    Raises:
        ValueError: it takes ``*args`` or ``**kwargs``, which cannot be bound by name.
    """
    names = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            what = f"{function.__qualname__} takes *{parameter.name}"
            raise ValueError(f"{what}: arguments are bound by name, list each one")
        names.append(parameter.name)
    return tuple(names)


def node_of(
    owner: str,
    cls: type,
    arguments: Mapping[str, Any],
    *,
    own: Collection[str],
    name: str | None = None,
    call: str = "forward",
    slot: str = "",
    reads: Mapping[str, str] | None = None,
) -> Node:
    """Build the Node of a plugin's class for a slot that supplies the names ``own``.

    ``reads`` applies to this node only, and overrides that of the class.

    Raises:
        ValueError: ``cls`` is not a Module class, its constructor does not take an argument or lacks
            one, or its ``forward`` cannot be bound.
    """
    if isinstance(cls, Module):
        kind = type(cls).__name__
        raise ValueError(f"{kind}(...) is a module that was made: hand in {kind} and its arguments")
    if not (isinstance(cls, type) and issubclass(cls, Module)):
        kind = cls.__name__ if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise ValueError(f"{kind} is not a class derived from minillm_core.Module")
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{cls.__name__} takes *{key}: list each of its arguments")
    for key in arguments:
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise ValueError(f"{cls.__name__} takes no argument '{key}' (it takes {known})")
    required = (key for key, one in parameters.items() if one.default is one.empty)
    if missing := [key for key in required if key not in (*arguments, "geometry")]:
        raise ValueError(f"{cls.__name__} needs the argument '{missing[0]}': pass it to the slot")
    function = getattr(cls, call)
    if function is Module.forward:
        raise ValueError(f"{cls.__name__} has no method forward")
    taken = call_names(function)
    for argument in cls.keeps:
        if argument not in taken or argument in own:
            why = "which the slot itself gives" if argument in own else f"{call} does not take it"
            raise ValueError(f"{cls.__name__}.keeps names '{argument}': {why}")
    if strays := {*cls.recurrent} - {*cls.keeps}:
        raise ValueError(f"{cls.__name__}.recurrent names '{min(strays)}', which it does not keep")
    own = (*own, *cls.keeps)
    renamed = {**cls.reads, **(reads or {})}
    for argument in renamed:
        said = f"{cls.__name__}.reads names '{argument}'"
        if argument not in taken:
            raise ValueError(f"{said}: {call} takes {', '.join(taken)}")
        if argument in own:
            raise ValueError(f"{said}, which the slot itself gives")
    bound = tuple(renamed.get(argument, argument) for argument in taken)
    return Node(
        name=name or owner,
        owner=owner,
        reference=reference_of(cls),
        arguments=json_arguments(arguments),
        reads=bound,
        external=tuple(sorted(set(bound) - set(own))),
        cls=cls,
        slot=slot,
        own=tuple(own),
    )


class Scope:
    """The arrays that the nodes of one forward pass may read, and those that they emit; blocks stay pure.

    This class is for whole rows; ``CachedScope`` (decoding.py) for columns that follow cached ones.
    """

    def __init__(self, reads: dict[str, Any]) -> None:
        self.reads = reads
        self.emitted: dict[str, Any] = {}
        self.tapped: dict[str, Any] = {}  # the taps of a block: "in", "attention.v" ... -> array

    def apply(self, node: Any, own: dict[str, Any], like: tuple[str, ...] = ()) -> Any:
        """Run ``node.forward`` on its arguments by name; record its terms and statistics.

        Args:
            node: the node.
            own: the slot's own arrays, by name.
            like: the names in ``own`` whose shapes and dtypes the results must have, in order; empty: any.
        """
        names = self.reads | own | self.kept(node)
        given = [names[name] for name in node.bound]
        before = node.framework.versions(given)
        result = self.split_emitted(node, node(*given))
        if node.framework.versions(given) != before:
            fix = "return new arrays: x * 2, not x *= 2"
            raise unusable(node, "changed an argument in place in", fix)
        _check_arrays(node, [own[name] for name in like], result)
        return result

    def run_block(
        self, block: Any, x: Any, *, checkpointing: bool, turn: int = 0
    ) -> tuple[Any, ...]:
        """Run a block on exactly its declared inputs; with ``checkpointing`` recompute it in the backward pass.

        ``turn`` counts the runs of a looped block: a KV cache has columns for each.
        """
        reads = [self.reads[name] for name in block.inputs]
        if checkpointing:
            return block.framework.checkpoint(block, x, *reads)
        return block(x, *reads)

    def kept(self, node: Any) -> dict[str, Any]:
        """Return the arrays that a node kept of earlier columns, by name; here None for each."""
        return dict.fromkeys(node.keeps)

    def positions(self, ops: Any) -> Any:
        """Return the columns' positions if no plugin sets them; None: 0, 1, 2 ..."""
        return None

    def attend(self, attention: Any, call: Any, x: Any) -> Any:
        """Attend from the call's queries to all keys that they may see; here the keys of the call."""
        return attention.attended(call, x, self)

    def columns(self, node: Any, documents: Any) -> Any:
        """Return the documents of all columns that a node may see, the new ones last; here ``documents``."""
        return documents

    def split_emitted(self, node: Any, result: Any) -> Any:
        """Record that ``node`` took part; return its result without the arrays that it keeps and emits."""
        node.framework.witness(f"node:{node.path}")
        emits = (*node.keeps, *node.terms, *node.statistics)
        if not emits:
            return result
        if not isinstance(result, (tuple, list)) or len(result) != 1 + len(emits):
            did = f"returned no tuple of {1 + len(emits)} from"
            raise unusable(node, did, f"return its result, {', '.join(emits)}")
        result, *extra = result
        for name, value in zip(emits, extra, strict=True):
            self.emitted[f"{node.path}.{name}"] = value
        return result


def _check_arrays(node: Any, like: Collection[Any], result: Any) -> None:
    """Check that a node's results are arrays of the shapes and dtypes of ``like``.

    Raises:
        PluginCodeError: they are not; the core would fail later, or compute wrong results.
    """
    parts = result if isinstance(result, (tuple, list)) else (result,)
    given = [_shape(part) for part in parts]
    wanted = [_shape(array) for array in like] or given
    if given != wanted or str in map(type, given):
        fix = " and ".join(map(str, wanted)) if like else "an array"
        raise unusable(node, f"returned {' and '.join(map(str, given))} from", f"return {fix}")
    for part, array in zip(parts, like, strict=False):
        check_dtype(node, part, array)


def check_shape(node: Any, result: Any, *shapes: tuple[int, ...]) -> Any:
    """Return a node's result; raise PluginCodeError if its shape is none of ``shapes``."""
    if (got := _shape(result)) not in shapes:
        fix = f"return {' or '.join(str(tuple(one)) for one in shapes)}"
        raise unusable(node, f"returned {got} from", fix)
    return result


def as_numbers(node: Any, result: Any, shape: tuple[int, ...]) -> Any:
    """Return a node's result as float32; raise PluginCodeError if its shape is not the slot's."""
    return node.ops.astype(check_shape(node, result, shape), "float32")


def check_dtype(node: Any, result: Any, like: Any) -> Any:
    """Return a node's result; raise PluginCodeError if it is NumPy's, or of another dtype than ``like``.

    If ``like`` is float64, as in the NumPy reference that checks use, any dtype is accepted.
    """
    if isinstance(result, np.ndarray) and not isinstance(like, np.ndarray):
        fix = "compute it with self.ops and operators; a constant array is a Buffer"
        raise unusable(node, "returned a NumPy array from", fix)
    wanted, got = dtype_name(like), dtype_name(result)
    if wanted not in (got, "float64"):
        fix = f"return {wanted}: cast with ops.astype(..., {wanted!r})"
        raise unusable(node, f"returned {got} from", fix)
    return result


def _shape(part: Any) -> tuple[int, ...] | str:
    """Return an array's shape, or the name of the type of any other object."""
    return tuple(part.shape) if hasattr(part, "shape") else type(part).__name__


def unusable(node: Any, did: str, fix: str, method: str = "forward") -> PluginCodeError:
    """Return the error for a node's result that cannot be used; ``did`` ends with ``from`` or ``in``."""
    name = f"{type(node).__name__}.{method}"
    return PluginCodeError(node.owner, name, did=did, where=node.path, fix=fix)


def inputs_of(spec: Any) -> set[str]:
    """Return the names of fields, streams, taps and schedule values that a resolved spec reads."""
    if hasattr(spec, "inputs"):
        return {*spec.inputs}
    if is_dataclass(spec):
        return inputs_of(tuple(vars(spec).values()))
    return set().union(*map(inputs_of, spec)) if isinstance(spec, tuple) else set()
