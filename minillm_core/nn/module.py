"""The neutral module: written once against ``self.ops``, materialised as a real module of a framework.

Inside ``materialising(framework)`` a class instantiates as a subclass of itself *and* of the
framework's own module class; outside it, as an outline that only knows its declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from minillm_core.errors import PlanError
from minillm_core.nn.param import Declaration
from minillm_core.nn.reference import place_of

_current: ContextVar[Framework | None] = ContextVar("framework", default=None)


@contextmanager
def materialising(framework: Framework) -> Iterator[None]:
    """Make every Module that is constructed inside native to ``framework``."""
    token = _current.set(framework)
    try:
        yield
    finally:
        _current.reset(token)


class Module:
    """The base of everything that computes.

    Subclasses call ``super().__init__()`` first in their ``__init__``, then declare (Param, Buffer,
    State, other modules, plain values), and compute in ``forward`` with ``self.ops`` alone. Plain
    values are frozen once materialised: a compiled step has them baked in.
    """

    ops: Any
    framework: ClassVar[Any] = None  # a Framework, once native
    leaf: ClassVar[str | None] = None  # the framework's own class to stand on, by a backend's name

    reads: ClassVar[Mapping[str, str]] = {}
    """Argument of ``forward`` -> the name at hand that it takes, where that is another: names of
    schedule values have dots (``{"lr": "train.lr"}``)."""
    terms: ClassVar[tuple[str, ...]] = ()
    """Named scalars that ``forward`` returns after its result, for the loss."""
    statistics: ClassVar[dict[str, str]] = {}
    """Named arrays that ``forward`` returns last -> their reduction over micro-batches and ranks
    (sum, mean, max); they carry no gradient and are what :meth:`next_state` is given."""
    lookback: int = 0
    """How many earlier columns ``forward`` needs beside each one that it computes, of any argument
    (B, T, ...): of x itself, a stream, a batch field. Decoding feeds a node the new columns of a
    sequence behind so many earlier ones (fewer at its start), and drops what it gives for those:
    so ``forward`` is written once, for whole rows. A constructor may set it; ``EVERYTHING``: all
    columns, at the price of computing them again for each new one. A node that looks back and does
    not say so generates from other numbers than those it was trained on. Processes that share rows
    bring a node these columns, and refuse one with ``EVERYTHING``, or with ``keeps``."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """Named arrays (B, T, ...), a column a token, that ``forward`` returns after its result, before
    terms. It has an argument of each name: None in training and at a sequence's start, else what it
    returned for all earlier columns (B, S, ...), which decoding appends and hands back (a latent of
    keys and values, cumulative gates). Such a node is given the new columns alone of all else."""
    recurrent: ClassVar[tuple[str, ...]] = ()
    """Those of ``keeps`` that are a state (B, ...) after the last column, and no column a token: what was
    returned last is handed back alone (a linear attention's memory, the tail of a convolution)."""

    whole: ClassVar[bool] = False
    """Weights of the loss (``loss.weights``) that a position has by the other rows of its micro-batch, as
    where the highest of all are taken: processes then divide a step by whole micro-batches alone."""

    path: str
    """Where it stands in the model; set once that is built."""
    owner: str
    """The plugin whose node it is; the core's modules have none."""
    bound: tuple[str, ...]
    """What a node's ``forward`` is given, by the names at hand."""

    if TYPE_CHECKING:  # a native base gives both

        def __call__(self, *args: Any, **named: Any) -> Any:
            """Run ``forward`` through the framework."""

        def __getattr__(self, name: str) -> Any:
            """Return what a backend or a subclass has set (for type checkers)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance of the current framework's subclass of this class."""
        native: Any = cls
        if cls.framework is None:
            native = (_current.get() or OUTLINE).native(cls)
        return super(Module, native).__new__(native)  # past Module in the native class

    def __init__(self) -> None:
        self.__dict__.update(_declared={}, _children={})
        super().__init__()

    def forward(self, *args: Any) -> Any:
        """Compute; arguments are bound by their names while planning."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def next_state(self, **statistics: Any) -> dict[str, Any]:
        """Return new values of this module's State attributes, from the step's reduced statistics."""
        raise NotImplementedError(f"{type(self).__name__} declares statistics but no next_state")


class Framework:
    """The base of all frameworks: it makes native classes, each once, and runs what they compute.

    Args:
        bases: the framework's own module classes by :attr:`Module.leaf`; None: for all others.
        ops: what modules compute with; None: they only declare.
    """

    ops: Any
    scope_of: Any = None  # the scope of batches with some columns of their rows, of those reads
    apart: Any = None  # a device without memory: of parameters each process will have parts

    def __init__(self, bases: Mapping[str | None, type], ops: Any = None) -> None:
        self._bases, self.ops = bases, ops
        self._native: dict[type, type] = {}
        self.seen = Counter[str]()  # evidence: key -> how often it was witnessed

    def native(self, cls: type[Module]) -> type:
        """Return ``cls`` as a subclass of itself and of the framework's class for it."""
        if cls not in self._native:
            base = self._bases.get(cls.leaf, self._bases[None])
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            body = {"framework": self, "ops": self.ops, **names}
            self._native[cls] = type(cls.__name__, (cls, base), body)
        return self._native[cls]

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``block(*arguments)``, recomputed in the backward pass."""
        raise NotImplementedError

    def constant(self) -> AbstractContextManager[Any]:
        """Keep nothing for a backward pass of what is computed inside, where that takes saying so."""
        return nullcontext()

    def witness(self, key: str) -> None:
        """Note, while tracing or in eager, that ``key`` takes part; costs a compiled step nothing."""
        self.seen[key] += 1

    def versions(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Count how often each was written in place, where the framework does; else nothing."""
        return ()


def record(module: Any, name: str, value: Any) -> None:
    """Note what an attribute declares or contains: every framework's base calls this first.

    Raises:
        AttributeError: a plain value, and the model is sealed.
        PlanError: ``super().__init__()`` has not been called.
    """
    notes = module.__dict__
    check_begun(module)
    if "_sealed" in notes and _is_plain(name, value):
        raise AttributeError(
            f"{type(module).__name__}.{name} is frozen: a compiled step has its value baked in. "
            "Keep what changes in a State, or take it as an argument (a schedule value, a field)"
        )
    declarations, children = notes["_declared"], notes["_children"]
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
    """Refuse a module whose constructor has left out the base's, on every framework alike.

    Raises:
        PlanError: one framework would fail far from there, another not at all.
    """
    if "_declared" not in module.__dict__:
        raise PlanError(
            f"{type(module).__name__}.__init__ does not call super().__init__() first",
            where=place_of(type(module).__init__),
            fix="call super().__init__() first, before anything is set",
        )


def seal(model: Any) -> None:
    """Freeze the plain attributes of every module: the model is built."""
    for _, module in named_modules(model):
        module.__dict__["_sealed"] = True


def _is_plain(name: str, value: Any) -> bool:
    """Return whether it is neither an array nor a framework's own note (torch's train, eval)."""
    own = name.startswith("_") or name == "training"
    return not own and not (hasattr(value, "dtype") and hasattr(value, "shape"))


def named_modules(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, module) of everything below, this one first, on any framework."""
    yield path, module
    for name, child in module.__dict__.get("_children", {}).items():
        yield from named_modules(child, f"{path}.{name}" if path else name)


def declared(
    module: Any, kind: type[Declaration] = Declaration
) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (name, owning module, attribute, declaration) of everything of ``kind`` below."""
    for path, owner in named_modules(module):
        for attribute, declaration in owner.__dict__.get("_declared", {}).items():
            if isinstance(declaration, kind):
                yield (f"{path}.{attribute}" if path else attribute), owner, attribute, declaration


class OutlineModule:
    """A base that only records."""

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        self.__dict__[name] = value


OUTLINE = Framework({None: OutlineModule})
"""The framework of planning: no arrays, only what modules declare."""
