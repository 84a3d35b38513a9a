"""What the loss is made of: a main target, further targets, further terms. Logits never leave the op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm_core.nn.node import Node
from minillm_core.nn.value import Setting
from minillm_core.ops.form import LossForm

__all__ = ["LossSpec", "Target", "Term", "shifted", "stacked", "target_weights"]


@dataclass(frozen=True)
class Target:
    """A further thing to predict from each position, train only."""

    key: str
    owner: str
    weight: Setting
    offset: int | None = None  # n: the token n ahead (1 is the main target)
    field: str | None = None  # or a batch field, int32 (B, T), -1 where there is none
    stage: str | None = None  # staged value that is 0 once it is gone; None: always there


@dataclass(frozen=True)
class Term:
    """A further scalar, train only: a mean over its micro-batch, reported apart."""

    key: str
    owner: str
    weight: Setting
    node: Node | None = None  # computed after the last norm ...
    emitted: str | None = None  # ... or emitted by nodes of this plugin under this name, summed


@dataclass(frozen=True)
class LossSpec:
    """The loss, resolved."""

    form: LossForm = field(default_factory=LossForm)
    form_owners: tuple[tuple[str, str], ...] = ()  # (field of the form, plugin that set it)
    targets: tuple[Target, ...] = ()  # sorted by key
    terms: tuple[Term, ...] = ()  # sorted by key

    def present(self, values: Mapping[str, Any]) -> tuple[Target, ...]:
        """The further targets that are there at these staged values."""
        return tuple(t for t in self.targets if t.stage is None or values[t.stage])


def shifted(ops: Any, labels: Any, offset: int) -> Any:
    """labels (B, T) int32 -> the labels ``offset`` - 1 further on, -1 past the row's end."""
    if offset == 1:
        return labels
    steps = offset - 1
    if steps >= labels.shape[1]:
        return ops.full_like(labels, -1)
    tail = ops.full_like(labels[:, :steps], -1)
    return ops.concat([labels[:, steps:], tail], 1)


def stacked(ops: Any, targets: list[Any], count: int) -> Any:
    """K targets (B, T) -> (K, N) int32."""
    if len(targets) == 1:
        return ops.reshape(targets[0], (1, count))
    return ops.stack([ops.reshape(target, (count,)) for target in targets], 0)


def target_weights(ops: Any, weights: list[Any], count: int) -> Any:
    """Per target None, a number, a 0-d array or a field (B, T) -> None, or float32 (K,) or (K, N)."""
    if all(weight is None for weight in weights):
        return None
    fields = any(len(getattr(weight, "shape", ())) == 2 for weight in weights)
    if not fields:
        return ops.stack([ops.scalar(1.0 if w is None else w) for w in weights], 0)
    rows = []
    for weight in weights:
        if len(getattr(weight, "shape", ())) == 2:
            rows.append(ops.reshape(weight, (count,)))
        else:
            rows.append(ops.broadcast_to(ops.scalar(1.0 if weight is None else weight), (count,)))
    return ops.stack(rows, 0)
