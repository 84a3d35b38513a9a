"""Fixtures: a correct plugin in a file of its own, and replacements of its lines that make it wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _both_frameworks() -> None:
    """Skip without both frameworks, which the contract compares."""
    pytest.importorskip("torch")
    pytest.importorskip("mlx.core")


RIGHT = '''
"""Each column is mixed with the one before it."""

from typing import Any

from pydantic import field_validator

from minillm_core import Linear, Module, Plugin, State, option, scheduled, stage, zeros

# at module level


class Smear(Module):
    """x (B, T, C) and, through a gate, the column before it."""

    lookback = 1
    statistics = {"level": "mean"}

    def __init__(self, geometry: Any, scale: float) -> None:
        super().__init__()
        self.gate = Linear(geometry.dim, 1, role="gate", init=zeros)
        self.level = State((1,), zeros)
        self.scale = scale

    def forward(self, x):
        before = self.ops.concat([self.ops.zeros_like(x[:, :1]), x[:, :-1]], 1)
        mixed = x + (self.scale + self.ops.like(self.level, x)) * self.gate(x) * before
        level = self.ops.reshape(self.ops.mean(self.ops.mean(self.ops.mean(x, -1), -1)), (1,))
        return mixed, level

    def next_state(self, level):
        return {"level": 0.9 * self.level + 0.1 * level}


class Open(Module):
    """y (B, T, H, D) times a gate of x (B, T, C), 1 at the start."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.layer = geometry.layer
        self.gate = Linear(geometry.dim, geometry.heads, role="gate", init=zeros)

    def forward(self, y, x):
        return y * self.ops.expand_dims(1.0 + self.gate(x), -1)


def soften(ops, update, param, state):
    mean = 0.5 * state["mean"] + 0.5 * update
    return update + 0.1 * mean, {"mean": mean}


HEARD = []
CALLS = []


class MyTrick(Plugin, api=1, identity_at_init=True):
    """A gate mixes each column with the one before it."""

    scale: float = option(0.5, gt=0, help="of the mixture")

    # in the class

    def build_attention(self, attn):
        attn.out.gate(Open)

    def build_model(self, model):
        # in the hook
        model.embed.mix(Smear, scale=self.scale)

    def build_data(self, data):
        data.field("parity")

    def on_batch(self, batch, phase):
        # for each batch
        return {**batch, "parity": batch["ids"] % 2}

    def on_event(self, event):
        HEARD.append(event.event)

    def optimizer_factory(self, optimizer):
        # of the gates alone: a compiled step has no graph of AdamW, which takes seconds each time
        optimizer.rule("plain", lr=scheduled(0.1))
        optimizer.assign("plain", lambda name, p: p.role == "gate")
        optimizer.extend("plain", "scale", stage(soften, state={"mean": "like"}))
'''


PARTNER = '''
"""A gain on the sublayer's output of the first layer."""

from typing import Any

from minillm_core import Module, Param, Plugin, ones


class Gain(Module):
    """x (B, T, C) times one number a feature."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.gain = Param((geometry.dim,), axes=("dim",), init=ones, role="scalar")

    def forward(self, x):
        return x * self.gain


class Partner(Plugin, api=1, identity_at_init=True):
    """A gain on what comes out of the embedding."""

    def build_model(self, model):
        model.residual("layers.0.in", "carry", Gain)
'''


@pytest.fixture
def partner(tmp_path: Path) -> Callable[..., str]:
    """Write a partner plugin with one line replaced; return its spec."""

    def write(right: str = "", wrong: str = "") -> str:
        assert not right or PARTNER.count(right) == 1, right
        file = tmp_path / "partner.py"
        file.write_text(PARTNER.replace(right, wrong) if right else PARTNER)
        return f"{file}:Partner"

    return write


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., str]:
    """Write the correct plugin with one line replaced; return its spec."""

    def write(right: str = "", wrong: str = "") -> str:
        assert not right or RIGHT.count(right) == 1, right
        file = tmp_path / "my_trick.py"
        file.write_text(RIGHT.replace(right, wrong) if right else RIGHT)
        return f"{file}:MyTrick"

    return write
