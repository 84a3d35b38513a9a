"""Capture of MLX's kernel launches without a GPU: ``mx.export_function`` calls back with each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

__all__ = ["Launch", "capture", "captured"]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        name: of the kernel, including template arguments.
        source: all source that MLX generates: header, signature, body, instantiation.
        grid: total number of threads.
        threadgroup: threads per threadgroup.
        shapes: for each input, whether its shape, strides and number of axes are passed as well.
    """

    name: str
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: tuple[tuple[bool, bool, bool], ...] = ()

    @property
    def arguments(self) -> str:
        """The template arguments, ``<float, 4>``; empty if there are none."""
        found = re.search(r"\[\[host_name.*?decltype\(\w+(<.*?>)\)", self.source, re.S)
        return found[1] if found else ""

    def changed(self, old: str, new: str) -> Launch:
        """Return the launch with one replacement in its source, to plant faults in tests.

        Raises:
            ValueError: ``old`` does not occur exactly once.
        """
        if self.source.count(old) != 1:
            raise ValueError(f"{self.source.count(old)} places, not one, read {old!r}")
        return replace(self, source=self.source.replace(old, new))


def capture(call: Callable[..., Any], *inputs: mx.array) -> list[Launch]:
    """Return the launches of custom kernels in ``call(*inputs)``; nothing is computed.

    MLX does not export ``init_value``: kernels here fill their outputs themselves.
    """
    found: list[Launch] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("type") != "primitive" or event.get("name") != "CustomKernel":
            return
        name, source, *numbers, shapes = event["arguments"][:9]
        found.append(Launch(name, source, tuple(numbers[:3]), tuple(numbers[3:]), tuple(shapes)))

    mx.export_function(note, call, *inputs)
    return found


def captured(call: Callable[..., Any], *inputs: mx.array) -> Launch:
    """Return the only launch in ``call(*inputs)``."""
    (launch,) = capture(call, *inputs)
    return launch
