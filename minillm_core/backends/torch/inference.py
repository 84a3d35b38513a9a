"""A model on torch, to be evaluated and sampled from; eager, so that nothing is compiled for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm_core.backends.base import Batch, Binding, Decoding, Model
from minillm_core.backends.decoding import Continuation, check_row
from minillm_core.backends.torch.feed import batch_to, numbers_to
from minillm_core.backends.torch.module import TorchFramework
from minillm_core.backends.torch.states import Statistics
from minillm_core.backends.torch.weights import Weights
from minillm_core.nn.node import Scope
from minillm_core.plan import Plan

__all__ = ["TorchModel"]


class TorchModel(Model):
    """A model on one device.

    Args:
        plan: what it is.
        binding: how it is computed.
        model: materialised and filled, float32.
        framework: what the model stands on.
        join: multiply leaves that read the same input as one.
    """

    def __init__(
        self, plan: Plan, binding: Binding, model: Any, framework: TorchFramework, *, join: bool
    ) -> None:
        self.plan, self.binding, self.model, self.framework = plan, binding, model, framework
        self.device = torch.device(binding.device)
        self.weights = Weights(model, getattr(torch, binding.dtype), join=join)
        self.statistics = Statistics(model)
        self.staged = plan.staged

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Nats and predictions of the main target."""
        given = self.final_values()
        total = torch.zeros((), dtype=torch.float64)
        count = torch.zeros((), dtype=torch.float64)
        pending: list[tuple[Tensor, Tensor]] = []
        with self._inferring():
            for host in batches:
                pending.append(self.model.evaluate(self.moved(host), given))
        for nats, predictions in pending:
            total += nats.double().cpu()
            count += predictions.double().cpu()
        return float(total), int(count)

    def next_logits(self, batch: Batch) -> np.ndarray:
        """float32 (V,) after the last column of one row."""
        check_row(batch, self.model.geometry)
        return self.last_logits(batch, Scope)

    def decoding(self) -> Decoding:
        """A sequence of no columns yet."""
        return Continuation(self.last_logits, self.model.geometry)

    @contextmanager
    def _inferring(self) -> Iterator[None]:
        """Without gradients, and with native modules' dropout and its like off."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def last_logits(self, batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        """float32 (V,) after the last column of one row: a whole one, or one that follows a past."""
        at = torch.full((1,), batch["ids"].shape[1] - 1, dtype=torch.int32, device=self.device)
        with self._inferring():
            logits = self.model.logits(self.moved(batch), self.final_values(), at, scope_of)
        return logits[0].float().cpu().numpy()

    def moved(self, host: Batch) -> dict[str, Tensor]:
        """The fields that the model reads, on its device."""
        return batch_to(host, self.plan.fields, self.device)

    def final_values(self) -> dict[str, Any]:
        """The schedules' values at the end of training: what a model is used with."""
        values = self.plan.values(1.0)
        dynamic = {name: v for name, v in values.items() if name not in self.staged}
        given: dict[str, Any] = dict(numbers_to(dynamic | {"normaliser": 1.0}, self.device))
        return given | {name: int(values[name]) for name in self.staged}

    def held(self) -> dict[str, Tensor]:
        """What a model is: ``model.<parameter>`` and ``state.<name>``, as they lie on the device."""
        held = {f"model.{name}": master for name, master in self.weights.masters.items()}
        return held | {f"state.{name}": t for name, t in self.statistics.states.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the model's arrays."""
        self.fill(self.held(), arrays)

    @torch.no_grad()
    def fill(self, held: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays into the tensors of the same names, and refresh the compute copies."""
        for name, tensor in held.items():
            value = torch.from_numpy(np.array(arrays[name], order="C"))
            if value.shape != tensor.shape:
                raise ValueError(f"{name}: shape {tuple(value.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(value)
        self.weights.refresh()
