"""The small model around a plugin that is checked: its sizes, and what is done to its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core.config.load import load
from minillm_core.config.schema import Config
from minillm_core.nn.init import generator

__all__ = ["ODD", "Batch", "moved", "rows", "settings", "supervised"]

Batch = dict[str, np.ndarray]

SMALL: Mapping[str, Any] = {
    **{"model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 48, "model.vocab": 97, "model.tied": False},
    **{"train.rows": 3, "train.seq_len": 13, "train.steps": 20, "train.lr": 1e-3},
    **{"train.compile": "off", "train.clip": 0.0},
}
"""The structure of preset tiny; every framework steps it in milliseconds. Lengths are odd."""

ODD: Mapping[str, Any] = {
    **{"model_layers": 3, "model_dim": 30, "model_heads": 3, "model_kv_heads": 1},
    **{"model_hidden": 35, "model_vocab": 61, "model_tied": True},
    **{"train_rows": 1, "train_seq_len": 7},
}
"""Settings in which nothing is a power of two, and what is shared is shared: heads, embedding."""

STIR = np.float32(0.1)
"""How far a weight is moved, in standard deviations."""


def settings(**changed: Any) -> Config:
    """The small model's config; ``train_dtype="bfloat16"`` is the setting ``train.dtype``."""
    given = {**SMALL, **{key.replace("_", ".", 1): value for key, value in changed.items()}}
    return load(
        preset="tiny",
        assignments=[f"{key}={str(value).lower()}" for key, value in given.items()],
        default_preset=lambda: ("tiny", "the contract kit"),
    ).config


def rows(config: Config, steps: int) -> list[Batch]:
    """Batches that can be learnt a little; row r lacks 2 r labels."""
    rng, shape, found = np.random.default_rng(0), (config.train.rows, config.train.seq_len), []
    for _ in range(steps):
        ids = (config.model.vocab * rng.random((shape[0], shape[1] + 1)) ** 3).astype(np.int32)
        labels = ids[:, 1:].copy()
        for row in range(shape[0]):
            labels[row, : 2 * row] = -1
        found.append(
            {
                "ids": ids[:, :-1].copy(),
                "labels": labels,
                "documents": np.zeros(shape, np.int32),
                "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
            }
        )
    return found


def moved(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter away from its initial value, float32: what starts at 0 takes part."""
    noise = generator(5, name).standard_normal(value.shape, np.float32)
    return value.astype(np.float32) + STIR * noise


def supervised(micro: Sequence[Batch]) -> int:
    """Labels >= 0 in all of them."""
    return sum(int((one["labels"] >= 0).sum()) for one in micro)
