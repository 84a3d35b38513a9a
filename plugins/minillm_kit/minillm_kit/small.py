"""Small models for tests of an author's own: plans of a few plugins, and what they compute in NumPy float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core import Module, Param, Plan, Plugin, build_plan, load
from minillm_core.inspection import LoadedPlugin, Scope, declared, initial_values, materialising
from minillm_kit.oracle import NumPyFramework, materialise

__all__ = ["SIZES", "SmallModel", "batch", "model", "node", "plan"]

SIZES = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 29}
"""Of the model, as settings of the table ``model``."""


@dataclass(frozen=True)
class SmallModel:
    """A plan's model in NumPy float64."""

    plan: Plan
    net: Any  # the decoder: net.layers[0].attention and so on

    def hidden(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Return what the head is given, (B, T, C)."""
        return self.net.hidden(batch, self.plan.values(1.0))[0]

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return what the attention of a layer adds to the stream x (B, T, C)."""
        block = self.net.layers[layer]
        return block.attention(block.attention_norm(x), Scope({}))

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return what the MLP of a layer adds to the stream x (B, T, C)."""
        block = self.net.layers[layer]
        return block.mlp(block.mlp_norm(x))

    def scalar(self, layer: int | None, site: str, source: str) -> float:
        """Return the learned coefficient of a source at a residual site; layer None: the one at the end."""
        place = self.net if layer is None else self.net.layers[layer]
        return float(getattr(place, f"site_{site}").coefficients[source].scalar[0])


def plan(
    *plugins: Plugin,
    seq_len: int | None = None,
    train: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Plan:
    """Plan a model of :data:`SIZES` with plugins, each named after its class.

    ::

        small.plan(Smear(across=True), layers=3)

    Args:
        plugins: made, with their options.
        seq_len: T, the length of a row; None: that of preset tiny.
        train: settings of the table ``train``.
        sizes: in the place of :data:`SIZES`.
    """
    settings = {f"model.{key}": value for key, value in {**SIZES, **sizes}.items()}
    if seq_len is not None:
        settings["train.seq_len"] = seq_len
    settings |= {f"train.{key}": value for key, value in (train or {}).items()}
    config = load(preset="tiny", settings=settings).config
    return build_plan(config, [LoadedPlugin.of(type(p).__name__.lower(), p) for p in plugins])


def model(plan: Plan, *, moved: bool = True) -> SmallModel:
    """Make a plan's model, in NumPy float64.

    Args:
        plan: of any size that NumPy can bear.
        moved: every parameter is moved by a normal number of 0.3, so that what starts at 0 takes part.
    """
    net, rng = materialise(plan, 0), np.random.default_rng(1)
    for _, module, attribute, param in declared(net, Param):
        start = getattr(module, attribute)
        noise = rng.standard_normal(param.shape) * (0.3 if moved else 0.0)
        setattr(module, attribute, start + noise)
    return SmallModel(plan, net)


def batch(rows: int = 2, length: int = 9) -> dict[str, np.ndarray]:
    """Draw ids below the vocabulary, and documents that begin anywhere: int32 (rows, length) each."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, SIZES["vocab"], (rows, length)).astype(np.int32)
    documents = np.cumsum(rng.random((rows, length)) < 0.3, axis=1).astype(np.int32)
    return {"ids": ids, "documents": documents}


def node(cls: type[Module], **arguments: Any) -> Any:
    """Make ``cls(**arguments)`` in NumPy float64, its parameters drawn from a normal distribution.

    Call it with arrays; its parameters are attributes: ``smear.gate.weight``.
    """
    framework = NumPyFramework()
    with materialising(framework):
        made = cls(**arguments)
    for module, attribute, value in initial_values(made, {}, 0):  # constants among them
        framework.fill(module, attribute, value)
    rng = np.random.default_rng(3)
    for _, module, attribute, param in declared(made, Param):
        setattr(module, attribute, rng.standard_normal(param.shape))
    return made
