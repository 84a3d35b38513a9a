"""Neutral modules on NumPy float64, forward only: the oracle for whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch
from minillm_core.backends.decoding import LastLogits
from minillm_core.backends.numpy.ops import NumPyOps
from minillm_core.nn.decoder import decoder
from minillm_core.nn.initial import initial_values
from minillm_core.nn.module import Natives, materialising, record
from minillm_core.plan import Plan

__all__ = ["NumPyFramework", "last_logits", "materialise"]


class NumPyModule:
    """Base of every materialised module."""

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any) -> Any:
        """``forward``."""
        return self.forward(*args)  # type: ignore[attr-defined]


class NumPyFramework(Natives):
    """What neutral modules stand on."""

    def __init__(self, ops: NumPyOps | None = None) -> None:
        super().__init__({None: NumPyModule})
        self.ops = ops or NumPyOps()
        self.seen: Counter[str] = Counter()

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """There is no backward pass to recompute anything in."""
        return block(*arguments)

    def witness(self, key: str) -> None:
        """Count."""
        self.seen[key] += 1


def materialise(plan: Plan, seed: int, *, positions: int | None = None) -> Any:
    """The plan's model with its seeded initial values, float64 (drawn in float32)."""
    geometry = replace(plan.spec.geometry, positions=positions or plan.config.train.seq_len)
    with materialising(NumPyFramework()):
        model = decoder(replace(plan.spec, geometry=geometry))
    for module, attribute, value in initial_values(model, plan.inits, seed):
        setattr(module, attribute, np.asarray(value, np.float64))
    return model


def last_logits(plan: Plan, model: Any) -> LastLogits:
    """What continues a sequence in float64, and what it is compared with; see ``Continuation``."""
    values = plan.values(1.0)

    def logits(batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        at = np.array([batch["ids"].shape[1] - 1], np.int32)
        return model.logits(dict(batch), values, at, scope_of)[0]

    return logits
