"""Parts of a plan in words: a value in a slot, and layers that are alike under one heading."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from minillm_core.nn.attention import DocumentMask
from minillm_core.nn.block import Omitted
from minillm_core.nn.decoder import Target, Term
from minillm_core.nn.init import Init
from minillm_core.nn.node import Node, Setting
from minillm_core.nn.reference import Function
from minillm_core.nn.residual import Learned
from minillm_core.optim.stage import Draft, Stage
from minillm_core.plugins.builders.data import Field

T = TypeVar("T", bound=Hashable)

LAYER = re.compile(r"(?:(?<=layers\.)|(?<=blocks\.)|(?<=attention\[)|(?<=mlp\[))\d+")


def fold(entries: Iterable[tuple[str, T]]) -> list[tuple[str, T, tuple[int, ...]]]:
    """Fold (name, value) to (name with ``*`` for the layer, value, layers), in order of appearance.

    A name without a layer has none.
    """
    layers: dict[tuple[str, T], list[int]] = {}
    for name, value in entries:
        found = LAYER.search(name)
        if found is None:
            layers.setdefault((name, value), [])
        else:
            pattern = f"{name[: found.start()]}*{name[found.end() :]}"
            layers.setdefault((pattern, value), []).append(int(found[0]))
    return [(name, value, tuple(sorted(held))) for (name, value), held in layers.items()]


def ranges(numbers: Iterable[int]) -> str:
    """Write ``0-3, 5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def located(layers: Iterable[int]) -> str:
    """Write ``layers 0-3`` or ``layer 2``; nothing where there are none."""
    found = [*layers]
    return f"layer{'s' if len(found) > 1 else ''} {ranges(found)}" if found else ""


def words(value: Any) -> str:
    """Word a value in a slot: ``Gate(width=12)``, ``nesterov``, ``0.5``, ``muon.lr``."""
    match value:
        case Node():
            given = ", ".join(f"{key}={argument}" for key, argument in value.arguments)
            return f"{_last(value.reference)}{f'({given})' if given else ''}"
        case Setting():
            return f"{value.constant:g}" if value.value is None else value.value
        case Learned():
            return f"learned, from {value.start:g}"
        case Omitted():
            return "none"
        case DocumentMask():
            return "apart"
        case Init():
            numbers = ", ".join(str(v) for key, v in value.data().items() if key != "init")
            return f"{type(value).__name__}({numbers})"
        case Target():
            return f"weight {words(value.weight)}"
        case Term():
            source = value.emitted if value.node is None else words(value.node)
            return f"{source}, weight {words(value.weight)}"
        case Field():
            return f"{value.dtype} (rows, T{''.join(f', {n}' for n in value.shape)})"
        case Function() | Stage():
            return _last(value.reference)
        case Draft():
            return _last(value.stage.reference)
        case _:
            return str(value)


def _last(reference: str) -> str:
    return reference.rpartition(":")[2]
