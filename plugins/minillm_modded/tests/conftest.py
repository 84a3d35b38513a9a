"""What the tests of this distribution share: small plans, and models on NumPy away from their start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin
from minillm_core.config.load import load
from minillm_core.nn.module import declared, materialising
from minillm_core.nn.node import Scope
from minillm_core.nn.param import Param
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import NumPyFramework, materialise

SIZES = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 29}


@dataclass(frozen=True)
class Model:
    """A plan's model in float64, every parameter moved: what starts at 0 takes part."""

    plan: Plan
    net: Any

    def hidden(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """(B, T, C) after the last norm."""
        return self.net.hidden(batch, self.plan.values(1.0))[0]

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """What the attention of a layer adds to the stream x (B, T, C)."""
        block = self.net.layers[layer]
        return block.attention(block.attention_norm(x), Scope({}))

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        """What the MLP of a layer adds to the stream x (B, T, C)."""
        block = self.net.layers[layer]
        return block.mlp(block.mlp_norm(x))

    def scalar(self, layer: int | None, site: str, source: str) -> float:
        """A learned coefficient."""
        place = self.net if layer is None else self.net.layers[layer]
        return float(getattr(place, f"site_{site}").coefficients[source].scalar[0])


class Lab:
    """Makes them."""

    @staticmethod
    def plan(
        *plugins: Plugin,
        seq_len: int | None = None,
        train: Mapping[str, Any] | None = None,
        **sizes: Any,
    ) -> Plan:
        """The small model with these plugins, each named after its class; ``layers=3`` and so on."""
        sizes = {f"model.{key}": value for key, value in {**SIZES, **sizes}.items()}
        if seq_len is not None:
            sizes["train.seq_len"] = seq_len
        sizes |= {f"train.{key}": value for key, value in (train or {}).items()}
        config = load(
            preset="tiny",
            assignments=[f"{key}={str(value).lower()}" for key, value in sizes.items()],
            default_preset=lambda: ("tiny", "test"),
        ).config
        return build_plan(config, [LoadedPlugin.of(type(p).__name__.lower(), p) for p in plugins])

    @staticmethod
    def model(plan: Plan, *, moved: bool = True) -> Model:
        """The plan's model; ``moved=False``: as it starts."""
        net, rng = materialise(plan, 0), np.random.default_rng(1)
        for _, module, attribute, param in declared(net, Param):
            start = getattr(module, attribute)
            noise = rng.standard_normal(param.shape) * (0.3 if moved else 0.0)
            setattr(module, attribute, start + noise)
        return Model(plan, net)

    @staticmethod
    def batch(rows: int = 2, length: int = 9) -> dict[str, np.ndarray]:
        """ids, and documents that begin anywhere."""
        rng = np.random.default_rng(2)
        ids = rng.integers(0, SIZES["vocab"], (rows, length)).astype(np.int32)
        documents = np.cumsum(rng.random((rows, length)) < 0.3, axis=1).astype(np.int32)
        return {"ids": ids, "documents": documents}


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    """Small plans and models."""
    return Lab


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """``node(Module, argument=...)``: a module on NumPy, its parameters drawn at random."""

    def make(cls: type, **arguments: Any) -> Any:
        with materialising(NumPyFramework()):
            made = cls(**arguments)
        rng = np.random.default_rng(3)
        for _, module, attribute, param in declared(made, Param):
            setattr(module, attribute, rng.standard_normal(param.shape))
        return made

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(4)
