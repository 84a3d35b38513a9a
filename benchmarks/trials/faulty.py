"""A plugin that uses every hook, with one fault in one place.

A trial copies this file as ``minillm_faulty.py`` and writes ``fault.json`` beside it: place, kind,
and duration of a hang. During a run the fault starts at the second call in the process.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import Candidate, Module, Param, Plugin, ones, stage

_PLACE, _KIND, _SECONDS = json.loads(Path(__file__).with_name("fault.json").read_text())
_RUNNING = {"on_batch", "on_event", "forward", "stage", "kernel"}
_calls: Counter[str] = Counter()


def is_at(place: str, kind: str) -> bool:
    """Return whether the fault has this place and kind."""
    return (place, kind) == (_PLACE, _KIND) and _calls[place] > (place in _RUNNING)


def fault(place: str, *, mutate: Callable[[], Any] = lambda: None) -> None:
    """Raise, hang or modify an argument, if this is the fault's place."""
    _calls[place] += 1
    if is_at(place, "exception"):
        raise ValueError("a plugin's own mistake")
    if is_at(place, "interrupt"):
        raise KeyboardInterrupt
    if is_at(place, "exit"):
        raise SystemExit(0)
    if is_at(place, "mutated"):
        mutate()
    if (is_at(place, "hang") or is_at(place, "signal")) and _calls[place] == 1 + (
        place in _RUNNING
    ):
        time.sleep(_SECONDS)


fault("import")


class Faulty(Plugin, api=1):
    """Takes part in everything."""

    fault("class")
    if is_at("class", "wrong type"):
        on_batch = 7
    else:

        def on_batch(self, batch: dict[str, Any], phase: str) -> Any:
            """Write the field ``weight``, all 1."""
            fault("on_batch", mutate=lambda: batch["ids"].__iadd__(10**6))
            if is_at("on_batch", "wrong type"):
                return [batch]
            weight = np.ones(batch["ids"].shape, np.float32)  # (rows, T)
            if is_at("on_batch", "non-finite"):
                weight[0, 0] = np.nan
            return batch | {"weight": weight}

    def build_attention(self, attn: Any) -> Any:
        """Add a node at the output of every layer's attention, and a scale."""
        fault("build_attention", mutate=lambda: setattr(attn, "window", 8))
        attn.out.gate(Gate)
        attn.scale(np.nan if is_at("build_attention", "non-finite") else 0.25)
        return [attn] if is_at("build_attention", "wrong type") else None

    def build_model(self, model: Any) -> Any:
        """Halve the output of the last layer's MLP."""
        fault("build_model", mutate=lambda: setattr(model, "residual", None))
        half = np.nan if is_at("build_model", "non-finite") else 0.5
        model.residual(f"layers.{model.layers - 1}.out", "sublayer", half)
        return [model] if is_at("build_model", "wrong type") else None

    def compute_loss(self, loss: Any) -> Any:
        """Add a z-loss."""
        fault("compute_loss", mutate=lambda: setattr(loss, "logits", None))
        loss.logits(z=np.nan if is_at("compute_loss", "non-finite") else 1e-4)
        return [loss] if is_at("compute_loss", "wrong type") else None

    def optimizer_factory(self, optimizer: Any) -> Any:
        """Add a stage of AdamW, and a smaller learning rate for the nodes' own parameters."""
        fault("optimizer_factory", mutate=lambda: setattr(optimizer, "weight_decay", 9.0))
        optimizer.extend("adamw", "scale", stage(scaled))
        rate = np.nan if is_at("optimizer_factory", "non-finite") else 0.5
        optimizer.set(lambda name, info: info.owner == "faulty", lr_mul=rate)
        return [optimizer] if is_at("optimizer_factory", "wrong type") else None

    def kernel_provider(self, kernels: Any) -> Any:
        """Offer a swiglu."""
        fault("kernel_provider", mutate=lambda: setattr(kernels, "candidate", None))
        kernels.candidate(
            Candidate(
                op="swiglu",
                name="faulty",
                backends=("torch", "mlx"),
                reference="minillm_faulty:swiglu",
                accepts=accepts,
                provider="faulty",
            )
        )
        return [kernels] if is_at("kernel_provider", "wrong type") else None

    def build_data(self, data: Any) -> Any:
        """Add a field of the batch."""
        fault("build_data", mutate=lambda: setattr(data, "reads", None))
        data.field("weight", "float32")
        return [data] if is_at("build_data", "wrong type") else None

    def on_event(self, event: Any) -> Any:
        """Receive an event."""
        fault("on_event", mutate=lambda: object.__setattr__(event, "step", -1))
        return [event] if is_at("on_event", "wrong type") else None


if is_at("import", "wrong type"):
    Faulty = 7  # type: ignore[misc,assignment]


class Gate(Module):
    """A learned gate: y (B, T, H, D), x (B, T, C), weight float32 (B, T) -> (B, T, H, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Param((1,), axes=("one",), init=ones, role="scalar", wd_mul=0.0)

    def forward(self, y: Any, x: Any, weight: Any) -> Any:
        """Multiply all elements by a learned number."""
        fault("forward", mutate=lambda: y.mul_(2.0))
        if is_at("forward", "wrong type"):
            return None
        if is_at("forward", "non-finite"):
            y = y * float("nan")
        weight = self.ops.expand_dims(self.ops.expand_dims(weight, -1), -1)  # (B, T, 1, 1)
        return y * weight * self.scale


def scaled(ops: Any, update: Any, param: Any, state: dict[str, Any]) -> Any:
    """Return the update unchanged."""
    fault("stage", mutate=lambda: param.mul_(2.0))
    if is_at("stage", "wrong type"):
        return update
    if is_at("stage", "non-finite"):
        update = update * float("inf")
    return update, state


def accepts(request: Any) -> Any:
    """Accept every request."""
    fault("accepts")
    return 7 if is_at("accepts", "wrong type") else None


def swiglu(gate: Any, up: Any) -> Any:
    """Compute silu(gate) * up."""
    fault("kernel", mutate=lambda: gate.mul_(2.0))
    if is_at("kernel", "wrong type"):
        return None
    y = gate / (1.0 + (-gate).exp()) * up
    return y * float("nan") if is_at("kernel", "non-finite") else y
