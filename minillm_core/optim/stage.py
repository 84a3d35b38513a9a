"""Update rules and their stages: a stage is a pure function on a stack of same-shaped arrays."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from minillm_core.nn.reference import json_arguments, reference_of, resolve
from minillm_core.optim.narrow import NARROW, Storage, packed, stored, unpacked
from minillm_core.optim.schedules import Schedule

BEHIND = ("lookahead", "average")
"""The stages after the write: both their ``update`` and their ``param`` are the new parameter. ``lookahead``
returns the parameter at which the next gradients are computed; ``average`` returns it unchanged."""

ANCHORS = ("momentum", "orthogonalise", "precondition", "scale", "decay", "write", *BEHIND)
"""The anchors of a rule's stages, in order."""

GRADIENT = "gradient"
"""The anchor before all others: stages that plugins add to rules, each applied to the previous result."""

GIVEN = ("ops", "update", "param", "state")
"""The first parameters of every stage's function, in this order."""

SUPPLIED = ("lr_mul", "wd_mul", "layer_grad_norm", "updates", "due")
"""Arguments that the core supplies: ``lr_mul``, ``wd_mul``: each parameter's factor, a number or float32
(N, 1, ...); the norm of the clipped gradients of the parameter's whole layer, 0-d or (N, 1, ...); the number
of updates, this one included, 0-d float32; and whether a stage with ``every`` is due."""

NEEDS = ("element", "matrix")

KINDS = ("like", "scalar", *NARROW)
"""The kinds of a state entry; a function of the shape is allowed as well."""


class Inherited:
    """The class of :data:`INHERITED`."""


INHERITED = Inherited()
"""Marks an argument of a stage that extends a rule: take its value from the stage that it replaces."""


@dataclass(frozen=True)
class Stage:
    """One stage of an update rule, as data; built by :func:`stage`."""

    reference: str
    state: tuple[tuple[str, str], ...] = ()  # entry -> one of KINDS, or a function of the shape
    needs: str = "element"  # "matrix": it works on whole matrices; "element": elementwise
    arguments: tuple[tuple[str, Any], ...] = ()  # constants of the compiled step
    values: tuple[tuple[str, str], ...] = ()  # argument -> name of a schedule value
    supplied: tuple[str, ...] = ()
    every: int = 1  # the stage runs once in so many updates

    def state_arrays(self, shape: tuple[int, ...]) -> dict[str, Storage]:
        """Return the shape and dtype of the state stored for a parameter of ``shape``, by entry.

        A scalar has as many axes as the parameter, all of size 1.
        """
        found: dict[str, Storage] = {}
        for entry, kind in self.state:
            plain = {entry: Storage(self._shape(kind, shape))}
            found |= stored(entry, kind, shape) if kind in NARROW else plain
        return found

    def packed(self, ops: Any, state: Mapping[str, Any], axes: int) -> dict[str, Any]:
        """Pack float32 entries as they are stored between updates; ``axes`` is 1 for stacks, else 0."""
        found: dict[str, Any] = {}
        for entry, kind in self.state:
            array = state[entry]
            found |= packed(ops, entry, kind, array, axes) if kind in NARROW else {entry: array}
        return found

    def unpacked(self, ops: Any, state: Mapping[str, Any], axes: int) -> dict[str, Any]:
        """Invert :meth:`packed`."""
        return {
            entry: unpacked(ops, entry, kind, state, axes) if kind in NARROW else state[entry]
            for entry, kind in self.state
        }

    @property
    def narrow(self) -> bool:
        """Whether any entry is stored in fewer bits than float32."""
        return any(kind in NARROW for _, kind in self.state)

    @cached_property
    def function(self) -> Any:
        """The function that computes it; access it before tracing, since a trace cannot import."""
        return resolve(self.reference)

    def apply(
        self, ops: Any, update: Any, param: Any, state: dict[str, Any], given: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Run the stage: update, param and state entries are float32 stacks (N, ...).

        If no stage of the rule needs matrices, they are the arrays of one parameter, unstacked.
        """
        named = dict(self.arguments)
        named.update((argument, given[value]) for argument, value in self.values)
        named.update((argument, given[argument]) for argument in self.supplied)
        return self.function(ops, update, param, state, **named)

    def _shape(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        known = {"like": shape, "scalar": (1,) * len(shape), **dict.fromkeys(NARROW, shape)}
        if kind in known:
            return known[kind]
        takes = inspect.signature(function := resolve(kind)).parameters
        return tuple(function(shape, **{k: v for k, v in self.arguments if k in takes}))

    def data(self) -> dict[str, Any]:
        """Return the stage as JSON."""
        return {
            "reference": self.reference,
            "state": dict(self.state),
            "needs": self.needs,
            "arguments": dict(self.arguments),
            "values": dict(self.values),
            **({"every": self.every} if self.every > 1 else {}),
        }


@dataclass(frozen=True)
class Draft:
    """A stage whose schedule values have no names in the plan yet."""

    stage: Stage
    schedules: dict[str, Schedule] = field(default_factory=dict)
    inherited: tuple[str, ...] = ()  # arguments to take from the replaced stage

    def inherit_from(self, other: Draft | None) -> Draft:
        """Return the draft with its inherited arguments filled in from the stage that it replaces.

        Raises:
            ValueError: the replaced stage has no such argument, or no stage is replaced.
        """
        constants, schedules = dict(self.stage.arguments), dict(self.schedules)
        had = {} if other is None else dict(other.stage.arguments) | other.schedules
        for name in self.inherited:
            if name not in had:
                raise ValueError(f"no replaced stage has an argument '{name}'")
            kind = schedules if isinstance(had[name], Schedule) else constants
            kind[name] = had[name]
        return Draft(replace(self.stage, arguments=tuple(sorted(constants.items()))), schedules)

    def named(self, prefix: str) -> Stage:
        """Return the stage, with its schedule values named ``prefix.argument``."""
        return replace(
            self.stage, values=tuple((a, f"{prefix}.{a}") for a in sorted(self.schedules))
        )


def stage(
    function: Any,
    *,
    state: Mapping[str, Any] | None = None,
    needs: str = "element",
    every: int = 1,
    **arguments: Any,
) -> Draft:
    """Make a stage from ``function(ops, update, param, state, *, ...) -> (update, state)``.

    Args:
        function: a module-level function; pure: it returns new arrays. If it returns an argument
            such as ``param`` as state, the state keeps the argument's value at that time.
        state: entry -> "like" (the parameter's shape), "scalar", or a function that maps the shape,
            and those of the stage's constants that it names (``rank``), to another shape; float32.
            "like:bfloat16" and "like:int8" are stored in these dtypes between updates (int8 with
            a float32 scale for each 256 numbers); the function still gets float32.
        needs: "element", or "matrix" for a function that needs whole matrices, stacked (N, R, C).
        every: the stage runs in the first update, and then once in so many updates. In the others
            the update is passed on and the state stays. A function that names ``due`` runs in every
            update, with due=True, a Python bool, whenever the stage is due: the two cases are
            compiled separately, so that skipped work costs nothing.
        arguments: its keyword arguments: numbers are constants of the compiled step, schedules
            are inputs of it; INHERITED is the argument of the stage that this one replaces.
            ``lr_mul``, ``wd_mul``, ``updates`` and ``due`` are supplied if the function names them;
            so is ``layer_grad_norm``, 0-d or (N, 1, ...): the norm of the gradients of all parameters
            of the parameter's layer together, or of the parameter alone if it is in no layer.

    Raises:
        ValueError: an argument is unknown, missing or not JSON; the function's first four parameters
            have another order; a kind of state is unknown.
    """
    if needs not in NEEDS:
        raise ValueError(f"needs={needs!r}: one of {', '.join(NEEDS)}")
    if type(every) is not int or every < 1:
        raise ValueError(f"every={every!r}: a whole number of updates, 1 or more")
    parameters = inspect.signature(function).parameters
    first = [*parameters][: len(GIVEN)]
    if any(name in GIVEN and name != given for name, given in zip(first, GIVEN, strict=False)):
        raise ValueError(
            f"{function.__name__} takes ({', '.join(first)}), not ({', '.join(GIVEN)})"
        )
    takes = dict(list(parameters.items())[len(GIVEN) :])
    supplied = tuple(name for name in SUPPLIED if name in takes)
    for name in arguments:
        if name not in takes or name in supplied:
            raise ValueError(f"{function.__name__} takes no argument '{name}'")
    for name, parameter in takes.items():
        if parameter.default is parameter.empty and name not in (*arguments, *supplied):
            raise ValueError(f"{function.__name__} needs the argument '{name}'")
    schedules = {k: v for k, v in arguments.items() if isinstance(v, Schedule)}
    inherited = tuple(k for k, v in arguments.items() if v is INHERITED)
    constants = {k: v for k, v in arguments.items() if k not in (*schedules, *inherited)}
    for entry, kind in (state or {}).items():
        if isinstance(kind, str) and kind not in KINDS:
            there = ", ".join(KINDS)
            raise ValueError(f"state '{entry}' of {kind!r}: {there}, or a function of the shape")
    entries = tuple(
        (entry, kind if isinstance(kind, str) else reference_of(kind))
        for entry, kind in sorted((state or {}).items())
    )
    numbers = json_arguments(constants)
    planned = Stage(reference_of(function), entries, needs, numbers, (), supplied, every)
    return Draft(planned, schedules, inherited)


@dataclass(frozen=True)
class Rule:
    """An update rule: its stages, each with its anchor and the plugin that provides it."""

    name: str
    owner: str
    stages: tuple[tuple[str, str, Stage], ...]  # (anchor, owner, stage), in the order of ANCHORS

    @property
    def stacked(self) -> bool:
        """Whether same-shaped parameters are stacked and updated together."""
        return any(s.needs == "matrix" for _, _, s in self.stages)

    def accepts(self, *arguments: str) -> bool:
        """Return whether the stages take all of these constants."""
        return set(arguments) <= {name for _, _, s in self.stages for name, _ in s.arguments}

    def data(self) -> dict[str, Any]:
        """Return the rule as JSON."""
        return {
            "name": self.name,
            "owner": self.owner,
            "stages": [
                {"anchor": anchor, "owner": owner, **s.data()} for anchor, owner, s in self.stages
            ],
        }
