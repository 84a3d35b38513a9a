"""What stands in a slot, in a few words: a class with its arguments, a function, a number."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from minillm_core.nn.attention import Apart
from minillm_core.nn.block import Nothing
from minillm_core.nn.init import Init
from minillm_core.nn.node import Node
from minillm_core.nn.residual import Learned
from minillm_core.nn.value import Setting
from minillm_core.optim.stage import Draft, Stage

__all__ = ["function_words", "words"]


@singledispatch
def words(value: Any) -> str:
    """The value for people to read: ``Gate(width=12)``, ``nesterov``, ``0.5``, ``muon.lr``."""
    return str(value)


@words.register
def _node(value: Node) -> str:
    given = ", ".join(f"{key}={argument}" for key, argument in value.arguments)
    return f"{_last(value.reference)}{f'({given})' if given else ''}"


@words.register
def _setting(value: Setting) -> str:
    return f"{value.constant:g}" if value.value is None else value.value


@words.register
def _learned(value: Learned) -> str:
    return f"learned, from {value.start:g}"


@words.register
def _nothing(value: Nothing) -> str:
    return "none"


@words.register
def _apart(value: Apart) -> str:
    return "apart"


@words.register
def _init(value: Init) -> str:
    numbers = ", ".join(str(v) for key, v in value.data().items() if key != "init")
    return f"{type(value).__name__}({numbers})"


@words.register
def _stage(value: Stage) -> str:
    return _last(value.reference)


@words.register
def _draft(value: Draft) -> str:
    return _last(value.stage.reference)


def function_words(value: tuple[str, str, Any]) -> str:
    """The name of a function that is kept as owner, reference, arguments."""
    return _last(value[1])


def _last(reference: str) -> str:
    return reference.rpartition(":")[2]
