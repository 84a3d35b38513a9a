"""State: arrays that the update writes once a step from the nodes' reduced statistics.

Pure, as MLX compiles it: states come in and new ones go out; modules hold them while a step is
traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.param import State

__all__ = ["Statistics"]

Arrays = dict[str, mx.array]


class Statistics:
    """How a step's statistics are reduced over micro-batches, and the State written from them."""

    def __init__(self, model: Any) -> None:
        self.writers = {p: m for p, m in named_modules(model) if m.statistics}
        self.kinds = {
            f"{path}.{name}": kind
            for path, module in self.writers.items()
            for name, kind in module.statistics.items()
        }
        self.holders = {
            name: (module, attribute) for name, module, attribute, _ in declared(model, State)
        }

    def states(self) -> Arrays:
        """What the modules hold now, by name."""
        return {name: module[attribute] for name, (module, attribute) in self.holders.items()}

    def place(self, states: Mapping[str, mx.array]) -> None:
        """Let the modules hold these."""
        for name, (module, attribute) in self.holders.items():
            module[attribute] = states[name]

    def merged(self, held: Arrays, fresh: Arrays) -> Arrays:
        """One micro-batch's statistics, and those of the ones before it."""
        return {
            name: mx.maximum(held[name], value) if self.kinds[name] == "max" else held[name] + value
            for name, value in fresh.items()
        }

    def next(self, states: Arrays, statistics: Arrays, mean: mx.array) -> Arrays:
        """The State that every module returns for its statistics; ``mean`` is 1 / micro-batches."""
        self.place(states)
        written = dict(states)
        for path, module in self.writers.items():
            given = {}
            for name, kind in module.statistics.items():
                value = statistics[f"{path}.{name}"]
                given[name] = value * mean if kind == "mean" else value
            for attribute, value in module.next_state(**given).items():
                written[f"{path}.{attribute}"] = value
        return written
