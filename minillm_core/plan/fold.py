"""Layers that are alike, said once: ``layers.0.mlp`` to ``layers.3.mlp`` are ``layers.*.mlp``, 0-3."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

__all__ = ["fold", "ranges"]

T = TypeVar("T", bound=Hashable)

LAYER = re.compile(r"(?:(?<=layers\.)|(?<=blocks\.)|(?<=attention\[)|(?<=mlp\[))\d+")


def fold(entries: Iterable[tuple[str, T]]) -> list[tuple[str, T, tuple[int, ...]]]:
    """(name, value) -> (name with ``*`` for the layer, value, layers), in order of appearance.

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
    """``0-3, 5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
