"""The framework-neutral module: written once against ``self.ops``, materialised as a native module.

Inside ``materialising(framework)`` a class instantiates as a subclass of itself *and* of the
framework's own module class; outside, as an outline that contains only its declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from minillm_core.errors import PlanError
from minillm_core.nn.param import Declaration, State
from minillm_core.nn.reference import place_of

_current: ContextVar[Framework | None] = ContextVar("framework", default=None)


@contextmanager
def materialising(framework: Framework) -> Iterator[None]:
    """Construct every Module inside this context as a native module of ``framework``."""
    token = _current.set(framework)
    try:
        yield
    finally:
        _current.reset(token)


class Module:
    """The base class of all layers, nodes and models.

    Subclasses call ``super().__init__()`` first in their ``__init__``, then set their attributes
    (Param, Buffer, State, modules, plain values), and compute in ``forward`` using only ``self.ops``.
    Plain values are frozen once the model is built: they are constants of the compiled step.
    """

    ops: Any
    framework: ClassVar[Any] = None  # the Framework of a native class
    leaf: ClassVar[str | None] = None  # the key of the framework's class to subclass, see Framework

    reads: ClassVar[Mapping[str, str]] = {}
    """Argument of ``forward`` -> the name of the value to bind it to, if the two differ: names of schedule
    values have dots (``{"lr": "train.lr"}``)."""
    terms: ClassVar[tuple[str, ...]] = ()
    """Names of scalars that ``forward`` returns after its result, as loss terms."""
    statistics: ClassVar[dict[str, str]] = {}
    """Names of arrays that ``forward`` returns last -> their reduction over micro-batches and ranks
    (sum, mean, max); they carry no gradient and are passed to :meth:`next_state`."""
    lookback: int = 0
    """The number of earlier columns that ``forward`` needs to compute a column, of any argument
    (B, T, ...): x itself, a stream, a batch field. Decoding passes a node the new columns of a
    sequence preceded by that many earlier ones (fewer at its start), and drops the results for those,
    so that ``forward`` is written once, for whole rows. A constructor may set it; ``EVERYTHING``: all
    columns, which are then recomputed for each new one. A node that looks back without declaring it
    computes other results in decoding than in training. Context parallelism exchanges these columns
    between processes, and refuses nodes with ``EVERYTHING`` or ``keeps``, and loss terms that look
    back: a batch field can hold what such a term needs of earlier tokens."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """Names of arrays (B, T, ...), one column per token, that ``forward`` returns after its result, before
    the terms. ``forward`` has an argument of each name: None in training and at a sequence's start, else
    (B, S, ...), the arrays that it returned for all earlier columns, concatenated (a latent of keys and
    values, cumulative gates). All other arguments of such a node contain only the new columns."""
    recurrent: ClassVar[tuple[str, ...]] = ()
    """The names in ``keeps`` of recurrent states: (B, ...) after the last column, not one column per token.
    Only the latest state is passed back (the state of linear attention, the tail of a convolution)."""

    whole: ClassVar[bool] = False
    """Whether the loss weights (``loss.weights``) of a position depend on other rows of its micro-batch, as
    with a top-k over all positions: processes then divide a step only into whole micro-batches."""

    path: str
    """The module's path in the model; set when the model is built."""
    owner: str
    """The plugin that a node belongs to; the core's modules have no such attribute."""
    bound: tuple[str, ...]
    """The names of the values that a node's ``forward`` is called with, in order."""

    if TYPE_CHECKING:  # a native base defines both

        def __call__(self, *args: Any, **named: Any) -> Any:
            """Run ``forward`` through the framework."""

        def __getattr__(self, name: str) -> Any:
            """Return an attribute set by a backend or a subclass (for type checkers)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create an instance of the current framework's subclass of this class."""
        native: Any = cls
        if cls.framework is None:
            native = (_current.get() or OUTLINE).native(cls)
        return super(Module, native).__new__(native)  # the class after Module in the native MRO

    def __init__(self) -> None:
        self.__dict__.update(_declared={}, _children={})
        super().__init__()

    def forward(self, *args: Any) -> Any:
        """Compute the result; arguments are bound by name when the plan is built."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def next_state(self, **statistics: Any) -> dict[str, Any]:
        """Return new values of this module's State attributes, from the step's reduced statistics."""
        raise NotImplementedError(f"{type(self).__name__} declares statistics but no next_state")


class Framework:
    """The base of all frameworks: it creates native classes, each once, and records evidence.

    Args:
        bases: :attr:`Module.leaf` -> the framework's own module class; None -> that of all others.
        ops: the ops object of modules; None: they only declare.
    """

    ops: Any
    scope_of: Any = None  # builds the scope under context parallelism, from the inputs by name
    param_device: Any = None  # "meta" if parameters are sharded: they get memory later, in parts

    def __init__(self, bases: Mapping[str | None, type], ops: Any = None) -> None:
        self._bases, self.ops = bases, ops
        self._native: dict[type, type] = {}
        self.evidence = Counter[str]()  # evidence: key -> how often it was recorded

    def native(self, cls: type[Module]) -> type:
        """Return ``cls`` as a subclass of itself and of the framework's class for it."""
        if cls not in self._native:
            base = self._bases.get(cls.leaf, self._bases[None])
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            body = {"framework": self, "ops": self.ops, **names}
            self._native[cls] = type(cls.__name__, (cls, base), body)
        return self._native[cls]

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``block(*arguments)`` with activation checkpointing: recomputed in the backward pass."""
        raise NotImplementedError

    def constant(self) -> AbstractContextManager[Any]:
        """Return a context without gradients, on frameworks that need one."""
        return nullcontext()

    def witness(self, key: str) -> None:
        """Record, at trace time or in eager mode, that ``key`` takes part; costs a compiled step nothing."""
        self.evidence[key] += 1

    def versions(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Return how often each array was written in place; empty if the framework does not count it."""
        return ()


def record(module: Any, name: str, value: Any) -> None:
    """Record the declaration or modules that an attribute is set to; every framework's base calls this first.

    Raises:
        AttributeError: the model is sealed, and the attribute is plain or a State.
        ValueError: the attribute has the name of a method of dict: MLX's modules are dicts.
        PlanError: ``super().__init__()`` has not been called.
    """
    notes = module.__dict__
    check_begun(module)
    if hasattr(dict, name) and isinstance(value, (Declaration, Module)):
        raise ValueError(f"'{name}' is a method of MLX's modules: give the attribute another name")
    if "_sealed" in notes and _is_plain(name, value):
        raise AttributeError(
            f"{type(module).__name__}.{name} is frozen: a compiled step has its value baked in. "
            "Keep what changes in a State, or take it as an argument (a schedule value, a field)"
        )
    declarations, children = notes["_declared"], notes["_children"]
    if "_sealed" in notes and isinstance(declarations.get(name), State):
        what = f"{type(module).__name__}.{name} is a State, which changes only between steps"
        raise AttributeError(f"{what}: return its new value from next_state, not in forward")
    if isinstance(value, Declaration):
        value.claim(name)
        declarations[name] = value
    elif isinstance(value, Module):
        children[name] = value
    elif isinstance(value, (list, tuple)):
        children.update((f"{name}.{i}", v) for i, v in enumerate(value) if isinstance(v, Module))
    elif isinstance(value, dict):
        children.update((f"{name}.{k}", v) for k, v in value.items() if isinstance(v, Module))


def check_begun(module: Any) -> None:
    """Check that a module's constructor has called ``super().__init__()``.

    Raises:
        PlanError: it has not; one framework would fail later and elsewhere, another never.
    """
    if "_declared" not in module.__dict__:
        raise PlanError(
            f"{type(module).__name__}.__init__ does not call super().__init__() first",
            where=place_of(type(module).__init__),
            fix="call super().__init__() first, before anything is set",
        )


def seal(model: Any) -> None:
    """Freeze the plain attributes of every module of a built model."""
    for _, module in named_modules(model):
        module.__dict__["_sealed"] = True


def _is_plain(name: str, value: Any) -> bool:
    """Return whether an attribute is no array, not private, and not torch's ``training``."""
    own = name.startswith("_") or name == "training"
    return not own and not (hasattr(value, "dtype") and hasattr(value, "shape"))


def named_modules(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, module) of a module and all modules below it, itself first, on any framework."""
    yield path, module
    for name, child in module.__dict__.get("_children", {}).items():
        yield from named_modules(child, f"{path}.{name}" if path else name)


def declared(
    module: Any, kind: type[Declaration] = Declaration
) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (name, owning module, attribute, declaration) of every declaration of ``kind`` in a module."""
    for path, owner in named_modules(module):
        for attribute, declaration in owner.__dict__.get("_declared", {}).items():
            if isinstance(declaration, kind):
                yield (f"{path}.{attribute}" if path else attribute), owner, attribute, declaration


class OutlineModule:
    """A module base that only records declarations."""

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        self.__dict__[name] = value


OUTLINE = Framework({None: OutlineModule})
"""The framework for building plans: modules have declarations, and no arrays."""
