"""Small models for an author's own tests: plans with a few plugins, and their outputs in NumPy float64."""

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
"""Sizes of the model, as settings of the table ``model``."""


@dataclass(frozen=True)
class SmallModel:
    """A plan's model in NumPy float64."""

    plan: Plan
    net: Any  # the decoder: net.layers[0].attention and so on

    def hidden(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Return the input of the head, (B, T, C)."""
        return self.net.hidden(batch, self.plan.values(1.0))[0]

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return a layer's attention output, added to the residual stream x (B, T, C)."""
        block = self.net.layers[layer]
        return block.attention(block.attention_norm(x), Scope({}))

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return a layer's MLP output, added to the residual stream x (B, T, C)."""
        block = self.net.layers[layer]
        return block.mlp(block.mlp_norm(x))

    def scalar(self, layer: int | None, site: str, source: str) -> float:
        """Return the learned coefficient of a source at a residual site; layer None: the final site."""
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
        plugins: instances, with their options.
        seq_len: T, the row length; None: that of preset tiny.
        train: settings of the table ``train``.
        sizes: overrides of :data:`SIZES`.
    """
    settings = {f"model.{key}": value for key, value in {**SIZES, **sizes}.items()}
    if seq_len is not None:
        settings["train.seq_len"] = seq_len
    settings |= {f"train.{key}": value for key, value in (train or {}).items()}
    config = load(preset="tiny", settings=settings).config
    return build_plan(config, [LoadedPlugin.of(type(p).__name__.lower(), p) for p in plugins])


def model(plan: Plan, *, moved: bool = True) -> SmallModel:
    """Build a plan's model, in NumPy float64.

    Args:
        plan: of any size feasible in NumPy.
        moved: add normal noise of standard deviation 0.3 to every parameter, so that zeros have an effect.
    """
    net, rng = materialise(plan, 0), np.random.default_rng(1)
    for _, module, attribute, param in declared(net, Param):
        start = getattr(module, attribute)
        noise = rng.standard_normal(param.shape) * (0.3 if moved else 0.0)
        setattr(module, attribute, start + noise)
    return SmallModel(plan, net)


def batch(rows: int = 2, length: int = 9) -> dict[str, np.ndarray]:
    """Draw ids below the vocabulary, and documents with random starts: int32 (rows, length) each."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, SIZES["vocab"], (rows, length)).astype(np.int32)
    documents = np.cumsum(rng.random((rows, length)) < 0.3, axis=1).astype(np.int32)
    return {"ids": ids, "documents": documents}


def node(cls: type[Module], **arguments: Any) -> Any:
    """Build ``cls(**arguments)`` in NumPy float64, with normally distributed parameters.

    Call it with arrays; its parameters are attributes: ``smear.gate.weight``.
    """
    framework = NumPyFramework()
    with materialising(framework):
        made = cls(**arguments)
    for module, attribute, value in initial_values(made, {}, 0):  # including constants
        framework.fill(module, attribute, value)
    rng = np.random.default_rng(3)
    for _, module, attribute, param in declared(made, Param):
        setattr(module, attribute, rng.standard_normal(param.shape))
    return made
