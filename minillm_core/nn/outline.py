"""The planning framework: no arrays, only what modules declare. Gives names, roles and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm_core.nn.module import Module, declared, record
from minillm_core.nn.param import Param, State

__all__ = ["OUTLINE", "Outline", "parameters", "states"]


class OutlineModule:
    """Base that only records."""

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        self.__dict__[name] = value


class Outline:
    """The framework of planning."""

    ops = None

    def __init__(self) -> None:
        self._native: dict[type, type] = {}

    def native(self, cls: type[Module]) -> type:
        """``cls`` as an outline."""
        if cls not in self._native:
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            bases = (cls, OutlineModule)
            self._native[cls] = type(cls.__name__, bases, {"framework": self, **names})
        return self._native[cls]

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """An outline computes nothing."""
        raise NotImplementedError

    def witness(self, key: str) -> None:
        """An outline computes nothing."""
        raise NotImplementedError


OUTLINE = Outline()


def parameters(model: Any) -> dict[str, Param]:
    """Name -> Param, in the order of the computation."""
    return {name: declaration for name, _, _, declaration in declared(model, Param)}


def states(model: Any) -> dict[str, State]:
    """Name -> State."""
    return {name: declaration for name, _, _, declaration in declared(model, State)}
