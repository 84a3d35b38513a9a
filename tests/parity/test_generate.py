"""Tests that a model generates the same ids with and without the KV cache, and on either framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.train.generate import Sampling, Window

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

SETS = [(), ("muon",), ("paired_heads",), ("muon", "paired_heads")]
PROMPT = [0, 5, 17, 3, 3]
TOKENS = 40  # exceeds the context of 16 several times


def written(model: Any, sampling: Sampling, *, cached: bool) -> list[int]:
    window, random = Window(model, 16, cached=cached), np.random.default_rng(5)
    ids, new = [], PROMPT
    for _ in range(TOKENS):
        new = [sampling.draw(window.next_logits(new), random)]
        ids += new
    return ids


@pytest.mark.broad(1)
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_the_cache_and_the_framework_change_no_id(lab: Any, names: tuple[str, ...]) -> None:
    plan = lab.plan(*names, train_lr=0.03)
    texts: dict[float, list[list[int]]] = {0.0: [], 1.0: []}
    for backend in ("torch", "mlx"):
        model = lab.trainer(plan, backend)
        if backend == "torch":  # its first predictions are nearly uniform
            lab.losses(model, plan, [[lab.batch(plan, seed)] for seed in range(10)])
            weights = model.arrays()
        model.load(weights)
        for temperature, found in texts.items():
            for cached in (True, False):
                found.append(written(model, Sampling(temperature), cached=cached))
    for temperature, (first, *others) in texts.items():
        assert others == [first] * 3, f"temperature {temperature}"
    assert len(set(texts[1.0][0])) > 10
