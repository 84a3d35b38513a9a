"""A model on MLX, to be evaluated and sampled from; eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core.backends.base import Batch, Binding, Decoding, Model
from minillm_core.backends.decoding import Continuation, check_row
from minillm_core.backends.mlx import saving
from minillm_core.backends.mlx.module import MLXFramework
from minillm_core.backends.mlx.states import Statistics
from minillm_core.backends.mlx.weights import Weights
from minillm_core.nn.node import Scope
from minillm_core.plan import Plan

__all__ = ["MLXModel"]

Arrays = dict[str, mx.array]


class MLXModel(Model):
    """A model.

    Args:
        plan: what it is.
        binding: how it is computed.
        model: materialised and filled, float32.
        framework: what the model stands on.
        join: multiply leaves that read the same input as one.
    """

    def __init__(
        self, plan: Plan, binding: Binding, model: Any, framework: MLXFramework, *, join: bool
    ) -> None:
        self.plan, self.binding, self.model, self.framework = plan, binding, model, framework
        self.weights = Weights(model, getattr(mx, binding.dtype), join=join)
        self.statistics = Statistics(model)
        self.masters: Arrays = self.weights.masters
        self.state: dict[str, Any] = {"states": self.statistics.states()}
        self.staged = plan.staged

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Nats and predictions of the main target."""
        given, total, count = self.final_values(), 0.0, 0
        with self._inferring():
            for host in batches:
                nats, predictions = self.model.evaluate(self.moved(host), given)
                mx.eval(nats, predictions)
                total, count = total + nats.item(), count + int(predictions.item())
        return total, count

    def next_logits(self, batch: Batch) -> np.ndarray:
        """float32 (V,) after the last column of one row."""
        check_row(batch, self.model.geometry)
        return self.last_logits(batch, Scope)

    def decoding(self) -> Decoding:
        """A sequence of no columns yet."""
        return Continuation(self.last_logits, self.model.geometry)

    def last_logits(self, batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        """float32 (V,) after the last column of one row: a whole one, or one that follows a past."""
        at = mx.array([batch["ids"].shape[1] - 1], dtype=mx.int32)
        with self._inferring():
            logits = self.model.logits(self.moved(batch), self.final_values(), at, scope_of)
            return np.array(logits[0].astype(mx.float32))

    @contextmanager
    def _inferring(self) -> Iterator[None]:
        """With the weights in place, and with native modules' dropout and its like off."""
        self.hold()
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def moved(self, host: Batch) -> Arrays:
        """The fields that the model reads."""
        return {name: mx.array(host[name]) for name in self.plan.fields if name in host}

    def final_values(self) -> dict[str, Any]:
        """The schedules' values at the end of training: what a model is used with."""
        values = self.plan.values(1.0)
        given = {n: mx.array(float(v)) for n, v in values.items() if n not in self.staged}
        return {
            **given,
            "normaliser": mx.array(1.0),
            **{name: int(values[name]) for name in self.staged},
        }

    def hold(self) -> None:
        """Let the modules hold real arrays: tracing leaves its placeholders in them."""
        self.weights.place(self.weights.copies(self.masters))
        self.statistics.place(self.state["states"])

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the model's arrays."""
        self.masters = saving.masters(arrays, self.masters)
        self.state = {**self.state, "states": saving.states(arrays, self.state["states"])}
        mx.eval(self.masters, self.state)
