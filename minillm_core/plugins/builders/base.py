"""What all builders share: an owner, and the making of nodes and settings with its name on them."""

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
"""Names that slots and the batch give; a stream or a field may not take one."""


class ValueTable:
    """The schedule values of a plan, by name, each with its owner; and what plugins say of it."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, Schedule]] = {}
        self.notes: dict[tuple[str, str], None] = {}  # owner, text

    def add(self, owner: str, name: str, schedule: Schedule, place: str = "") -> str:
        """Note a value; equal schedules under one name are one value.

        Returns:
            Its name: ``name``, or ``name.place`` where another schedule has that already.
        """
        for candidate in (name, f"{name}.{place}" if place else name):
            if self.held.setdefault(candidate, (owner, schedule)) == (owner, schedule):
                return candidate
        raise PlanError(
            f"schedule value '{name}' is declared twice, by '{self.held[name][0]}' and '{owner}'",
            fix="give one of them another name",
        ).concerning(plugins=(self.held[name][0], owner))


def offered_twice(what: str, other: str, owner: str, where: str) -> PlanError:
    """Make the error of two plugins that bring something of one name: ``what`` is ``by both``."""
    error = PlanError(
        f"{what} by both '{other}' and '{owner}'",
        where=where,
        fix=f"leave out one of them, such as '{owner}'",
    )
    return error.concerning(plugins=(other, owner))


class _Sealing(type):
    """Seals what it has made."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        made = super().__call__(*arguments, **named)
        object.__setattr__(made, "_sealed", True)
        return made


class UnknownSlot(PlanError, AttributeError):
    """A builder has nothing of that name; ``hasattr`` answers as of any object."""


class Sealed(metaclass=_Sealing):
    """Base of what is handed to plugins: slots are called, and nothing is ever set."""

    _sealed = False

    if not TYPE_CHECKING:  # to which every slot would be known

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self).__name__
            if name.startswith("_"):
                raise AttributeError(f"'{kind}' object has no attribute '{name}'")
            known = sorted(one for one in dir(self) if not one.startswith("_"))
            raise UnknownSlot(
                f"{kind}.{name} is no slot, and nothing else that a builder tells",
                fix=f"{did_you_mean(name, known)}there is {', '.join(known)}",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed:
            raise PlanError(
                f"{type(self).__name__}.{name} was assigned ({type(value).__name__}), which plans "
                "nothing",
                fix=f"slots are called: .{name}(...); what a builder tells cannot be changed",
            )
        super().__setattr__(name, value)


class Builder(Sealed):
    """Base of the builders: the plugin whose hook is called, and the slots that it fills.

    Args:
        owner: the plugin.
        values: the schedule values of the plan.
        slots: those of this builder.
    """

    def __init__(self, owner: str, values: ValueTable, slots: Any) -> None:
        self._owner, self._values, self._slots = owner, values, slots

    def note(self, text: str) -> None:
        """Print a note once, while a run is planned or started: ``note: NAME: text``.

        For what is not wrong and not what people would expect, such as options that do nothing at
        the sizes of this run.

        Args:
            text: one line.
        """
        self._values.notes[self._owner, plain(text)] = None

    def _refusal(self, slot: str, text: str, **more: Any) -> PlanError:
        """Make the error of a plugin that fills a slot wrongly."""
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
        """Refuse numbers that are none; what is no number at all is left to its own checks."""
        for name, value in numbers.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(number, float) and not isfinite(number):
                    raise self._refusal(slot, f"{name}={number} is no finite number")

    def _named(self, slot: str, name: str) -> None:
        """Refuse a name that forward() could not ask for, or that means something already."""
        if not name.isidentifier() or keyword.iskeyword(name):
            raise PlanError(f"plugin '{self._owner}', {slot}: '{name}' is no name of an argument")
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
    """A named place in a chain: call it to join, close it to keep others out."""

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
        """Join here with a node of ``cls(**arguments)``.

        Args:
            cls: a Module whose ``forward`` names the slot's arguments, or what it reads.
            name: a suffix, where a plugin puts several nodes into one chain.
            before: names of other plugins' nodes at this anchor; one that is absent is no matter.
            after: the same.
            reads: argument of ``forward`` -> the name at hand, where this node's differ.
            arguments: of the Module's constructor, JSON.
        """
        before, after = ((v,) if isinstance(v, str) else tuple(v) for v in (before, after))
        slot = f"{self._chain.where}.{self._name}"
        node = self._builder._node(slot, self._own, cls, arguments, name, reads=reads)
        self._chain.add(self._name, node, before, after)

    def close(self, reason: str) -> None:
        """Keep every other plugin out of this place, for ``reason``.

        ::

            attn.out.correct.close("paired v no longer lines up with y head by head")
        """
        self._chain.close(self._builder._owner, self._name, reason)
