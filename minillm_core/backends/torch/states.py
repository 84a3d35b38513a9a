"""State: arrays that the update writes once a step from the nodes' reduced statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm_core.backends.torch.guard import overwrite
from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.param import State

__all__ = ["Statistics"]


class Statistics:
    """A step's statistics, reduced over micro-batches, and the State written from them."""

    def __init__(self, model: Any) -> None:
        self.writers = {p: m for p, m in named_modules(model) if m.statistics}
        self.kinds = {
            f"{path}.{name}": kind
            for path, module in self.writers.items()
            for name, kind in module.statistics.items()
        }
        self.states: dict[str, Tensor] = {
            name: getattr(module, attribute)
            for name, module, attribute, _ in declared(model, State)
        }
        self.held: dict[str, Tensor] = {}

    def add(self, statistics: Mapping[str, Tensor], *, first: bool) -> None:
        """Reduce one micro-batch's."""
        for name, value in statistics.items():
            if first:
                self.held[name] = value
            elif self.kinds[name] == "max":
                self.held[name] = torch.maximum(self.held[name], value)
            else:
                self.held[name] = self.held[name] + value

    @torch.no_grad()
    def write(self, micro_batches: int, found: Tensor) -> None:
        """Give every module its statistics, and write the State that it returns.

        Args:
            micro_batches: of the step.
            found: 0-d float32, 1 where the step is skipped: State stays as it is.
        """
        skip = found > 0
        for path, module in self.writers.items():
            given = {}
            for name, kind in module.statistics.items():
                value = self.held[f"{path}.{name}"]
                given[name] = value / micro_batches if kind == "mean" else value
            for attribute, value in module.next_state(**given).items():
                overwrite(getattr(module, attribute), value, skip)
