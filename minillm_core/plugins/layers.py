"""The selection of the layers that a technique changes, independent of the number of layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from minillm_core.errors import PlanError

_EVERY = re.compile(r"every:([1-9]\d{0,5})")


@dataclass(frozen=True, init=False, repr=False)
class Layers:
    """A selection: ``"all"``, ``"every:2"`` (0, 2, 4, ...) or indices such as ``[0, -1]``, -1 being the last.

    The type of an option that selects layers.

    ::

        layers: Layers = option("all", help="layers that get a gate")

    Raises:
        ValueError: none of the three forms.
    """

    _spec: str | tuple[int, ...]

    def __init__(self, spec: str | Sequence[int] | Layers = "all") -> None:
        if isinstance(spec, Layers):
            spec = spec._spec
        if isinstance(spec, str):
            if spec != "all" and not _EVERY.fullmatch(spec):
                raise ValueError(f'{spec!r} is neither "all" nor "every:N"')
        elif isinstance(spec, (list, tuple)) and all(type(index) is int for index in spec):
            if not spec:
                raise ValueError("an empty list names no layer")
        else:
            raise ValueError(f'{spec!r} is neither "all", "every:N" nor a list of integers')
        object.__setattr__(self, "_spec", spec if isinstance(spec, str) else tuple(spec))

    def resolve(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices in a model of ``num_layers`` layers, ascending.

        Raises:
            PlanError: an index is outside the model, or a layer is named twice.
        """
        if isinstance(self._spec, str):
            step = 1 if self._spec == "all" else int(self._spec.removeprefix("every:"))
            return tuple(range(0, num_layers, step))
        more = "s" * (num_layers > 1)
        for index in self._spec:
            if not -num_layers <= index < num_layers:
                raise PlanError(
                    f"layer {index} is outside the model, which has {num_layers} layer{more}",
                    where=f"layers={self}",
                    fix=f"name layers from 0 to {num_layers - 1}, or -1 for the last",
                )
        indices = sorted(index % num_layers for index in self._spec)
        for index, following in pairwise(indices):
            if index == following:
                raise PlanError(
                    f"layer {index} is named twice in a model of {num_layers} layer{more}",
                    where=f"layers={self}",
                    fix=f"name it once, as {index} or as {index - num_layers}",
                )
        return tuple(indices)

    def names(self, layer: int, num_layers: int) -> bool:
        """Return whether ``layer`` is listed by its index, not by ``all`` or ``every:N``."""
        listed = () if isinstance(self._spec, str) else self._spec
        return layer in {index % num_layers for index in listed}

    def data(self) -> str | list[int]:
        """Return the selection in the form given, as JSON."""
        return self._spec if isinstance(self._spec, str) else list(self._spec)

    def __str__(self) -> str:
        return str(self.data())

    def __repr__(self) -> str:
        return f"Layers({self.data()!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(cls.data)
        )
