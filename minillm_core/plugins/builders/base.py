"""The base of all builders: an owner, and the nodes and settings created in its name."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

from minillm_core.errors import PlanError
from minillm_core.nn.node import Node, Setting, node_of
from minillm_core.nn.reference import Function, json_arguments, reference_of
from minillm_core.optim.schedules import Schedule
from minillm_core.plugins.slots import Chain
from minillm_core.text import did_you_mean, plain

RESERVED = frozenset(
    {"x", "y", "q", "k", "v", "carry", "sublayer", "x0"}
    | {"ids", "labels", "documents", "positions", "weights", "normaliser", "head", "losses", "form"}
    | {"mask", "distance", "window", "scale"}
)
"""Names that slots and the batch provide; no stream or field may use one."""


class ValueTable:
    """The schedule values of a plan by name, each with its owner; and the notes of plugins."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, Schedule]] = {}
        self.notes: dict[tuple[str, str], None] = {}  # owner, text

    def add(self, owner: str, name: str, schedule: Schedule, place: str = "") -> str:
        """Register a schedule value; equal schedules under one name are one value.

        Returns:
            The value's name: ``name``, or ``name.place`` if a different schedule has the name ``name``.
        """
        for candidate in (name, f"{name}.{place}" if place else name):
            if self.held.setdefault(candidate, (owner, schedule)) == (owner, schedule):
                return candidate
        raise PlanError(
            f"schedule value '{name}' is declared twice, by '{self.held[name][0]}' and '{owner}'",
            fix="give one of them another name",
        ).concerning(plugins=(self.held[name][0], owner))


def offered_twice(what: str, other: str, owner: str, where: str) -> PlanError:
    """Return the error for two plugins that define the same name; ``what`` precedes "by both" in its text."""
    error = PlanError(
        f"{what} by both '{other}' and '{owner}'",
        where=where,
        fix=f"leave out one of them, such as '{owner}'",
    )
    return error.concerning(plugins=(other, owner))


class _Sealing(type):
    """A metaclass that seals every new instance against assignment."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        made = super().__call__(*arguments, **named)
        object.__setattr__(made, "_sealed", True)
        return made


class UnknownSlot(PlanError, AttributeError):
    """An unknown attribute of a builder; also an AttributeError, so that ``hasattr`` works."""


class Sealed(metaclass=_Sealing):
    """Base of the objects handed to plugins: slots are called, and assignments are refused."""

    _sealed = False

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self).__name__
            if name.startswith("_"):
                raise AttributeError(f"'{kind}' object has no attribute '{name}'")
            known = sorted(one for one in dir(self) if not one.startswith("_"))
            raise UnknownSlot(
                f"{kind}.{name} is not a slot or value of this builder",
                fix=f"{did_you_mean(name, known)}there is {', '.join(known)}",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed:
            raise PlanError(
                f"{type(self).__name__}.{name} was assigned ({type(value).__name__}), without effect",
                fix=f"call slots: .{name}(...); a builder's values are read-only",
            )
        super().__setattr__(name, value)


class Builder(Sealed):
    """Base of the builders: the plugin whose hook is called, and the slots that it may fill.

    Args:
        owner: the plugin.
        values: the schedule values of the plan.
        slots: the slots of this builder.
    """

    def __init__(self, owner: str, values: ValueTable, slots: Any) -> None:
        self._owner, self._values, self._slots = owner, values, slots

    def note(self, text: str) -> None:
        """Print a note once, while a run is planned or started: ``note: NAME: text``.

        For a valid but unexpected situation, such as options that have no effect at the sizes of
        this run.

        Args:
            text: the note, one line.
        """
        self._values.notes[self._owner, plain(text)] = None

    def _refusal(self, slot: str, text: str, **more: Any) -> PlanError:
        """Return the error for a plugin that fills a slot wrongly."""
        error = PlanError(f"plugin '{self._owner}', slot {slot}: {text}", **more)
        return error.concerning(slot, plugins=(self._owner,))

    def _node(
        self,
        slot: str,
        own: Collection[str],
        cls: type,
        arguments: dict[str, Any],
        name: str | None = None,
        **more: Any,
    ) -> Node:
        full = self._owner if name is None else f"{self._owner}_{name}"
        try:
            return node_of(self._owner, cls, arguments, own=own, name=full, slot=slot, **more)
        except ValueError as error:
            raise self._refusal(slot, str(error)) from error

    def _setting(self, slot: str, number: Any, place: str = "") -> Setting:
        if isinstance(number, Schedule):
            name = self._values.add(self._owner, f"{self._owner}.{slot}", number, place)
            return Setting(self._owner, value=name)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number):
            raise self._refusal(
                slot,
                f"{number!r} is neither a number nor a schedule (piecewise, cosine, scheduled, "
                "plateaus, stages)",
            )
        return Setting(self._owner, constant=number)

    def _finite(self, slot: str, **numbers: Any) -> None:
        """Refuse NaN and infinity; values of other types are left to the caller's own checks."""
        for name, value in numbers.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(number, float) and not isfinite(number):
                    raise self._refusal(slot, f"{name}={number} is not a finite number")

    def _named(self, slot: str, name: str) -> None:
        """Refuse a name that cannot be an argument of ``forward``, or that is reserved."""
        if not name.isidentifier() or keyword.iskeyword(name):
            raise PlanError(
                f"plugin '{self._owner}', {slot}: '{name}' is not the name of an argument"
            )
        if name in RESERVED:
            raise PlanError(
                f"plugin '{self._owner}', {slot}: '{name}' is a reserved name",
                fix="taken are " + ", ".join(sorted(RESERVED)),
            )

    def _function(self, slot: str, function: Any, arguments: dict[str, Any]) -> Function:
        try:
            return Function(self._owner, reference_of(function), json_arguments(arguments))
        except ValueError as error:
            raise self._refusal(slot, str(error)) from error


class Anchor(Sealed):
    """A named place in a chain: call it to insert a node, close it to refuse nodes of other plugins."""

    def __init__(self, builder: Builder, chain: Chain, name: str, own: tuple[str, ...]) -> None:
        self._builder, self._chain, self._name, self._own = builder, chain, name, own

    def __call__(
        self,
        cls: type,
        *,
        name: str | None = None,
        before: str | tuple[str, ...] = (),
        after: str | tuple[str, ...] = (),
        reads: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Insert a node ``cls(**arguments)`` at this anchor.

        Args:
            cls: a Module class whose ``forward`` names the slot's arguments, or other values that it reads.
            name: a suffix that distinguishes several nodes of one plugin in a chain.
            before: names of other plugins' nodes at this anchor that this node precedes; absent ones are ignored.
            after: names of nodes at this anchor that this node follows; absent ones are ignored.
            reads: argument of ``forward`` -> name of the value passed for it; default: the argument's own name.
            arguments: constructor arguments, JSON values.
        """
        slot = f"{self._chain.where}.{self._name}"
        node = self._builder._node(slot, self._own, cls, arguments, name, reads=reads)
        self._chain.add(self._name, node, before, after)

    def close(self, reason: str) -> None:
        """Refuse nodes of every other plugin at this anchor; ``reason`` is shown in the error.

        ::

            attn.out.correct.close("paired v no longer lines up with y head by head")
        """
        self._chain.close(self._builder._owner, self._name, reason)
