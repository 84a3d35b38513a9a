"""Tests of skipped blocks against the stream computed row by row; of evaluation; and of resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Layers, Run, Stepped, build_plan, load
from minillm_core.checkpoint.read import chosen_or_refuse
from minillm_core.errors import PlanError
from minillm_mix.stochastic_depth import StochasticDepth


@pytest.mark.parametrize("rescale", [True, False])
def test_a_row_passes_over_the_blocks_whose_draw_is_low(lab: Any, rescale: bool) -> None:
    plan = lab.plan(StochasticDepth(drop=0.6, rescale=rescale))  # fractions 0, .2, .4, .6
    model, batch = lab.model(plan), lab.batch(rows=5)
    drawn = np.random.default_rng(0).random(batch["ids"].shape).astype(np.float32)
    drawn[:, 1:4] = [
        [0.1, 0.1, 0.1],
        [0.3, 0.3, 0.3],
        [0.5, 0.5, 0.5],
        [0.9, 0.9, 0.9],
        [0.1, 0.9, 0.1],
    ]
    found = model.hidden({**batch, "depth_drawn": drawn})
    over = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 0, 1]], bool)
    for row in range(5):
        x = model.net.embedding(batch["ids"][row : row + 1])
        for layer in range(4):
            if layer and over[row, layer - 1]:
                continue
            factor = 1 / (1 - 0.2 * layer) if rescale else 1.0
            x = x + factor * model.attention(layer, x)
            x = x + factor * model.mlp(layer, x)
        np.testing.assert_allclose(found[row], model.net.norm(x)[0], rtol=1e-6)


def test_evaluation_is_that_of_the_model_without_it(lab: Any) -> None:
    plugin, batch = StochasticDepth(drop=0.9), lab.batch()
    ours, plain = lab.model(lab.plan(plugin)), lab.model(lab.plan())
    for phase in ("eval", "decode"):
        given = plugin.on_batch(batch, phase)
        np.testing.assert_array_equal(ours.hidden(given), plain.hidden(batch))


@pytest.mark.parametrize("by", ["row", "batch"])
def test_draws_are_even_and_for_a_row_or_for_all(by: Any, monkeypatch: Any) -> None:
    rng = np.random.default_rng(1)
    monkeypatch.setattr("minillm_mix.stochastic_depth.random_stream", lambda: rng)
    ids = np.zeros((64, 50), np.int32)
    drawn = np.stack(
        [StochasticDepth(by=by).on_batch({"ids": ids}, "train")["depth_drawn"] for _ in range(40)]
    )
    assert drawn.dtype == np.float32
    assert (drawn.min() >= 0) & (drawn.max() < 1)
    assert (drawn < 0.1).mean() == pytest.approx(0.1, abs=0.01)
    assert np.all(drawn == drawn[:, :1]) == (by == "batch")


def test_the_first_block_is_always_there(lab: Any) -> None:
    with pytest.raises(PlanError, match="skips no block"):
        lab.plan(StochasticDepth(layers=Layers([0])))
    plan = lab.plan(StochasticDepth(layers=Layers([-1])))
    assert [p.slot for p in plan.placements if "residual" in p.slot] == [
        "model.residual[layers.3.mid][sublayer]",
        "model.residual[layers.3.out][sublayer]",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_resumed_run_passes_over_the_same_blocks(tmp_path: Path, backend: str) -> None:
    pytest.importorskip("torch" if backend == "torch" else "mlx.core")
    (tmp_path / "text.txt").write_text("A dark and stormy night, the {n}th of them.\n" * 200)
    settings = {
        **{"model.vocab": 300, "model.dim": 32, "model.layers": 3, "model.heads": 2},
        **{"model.kv_heads": 2, "model.hidden": 32, "train.rows": 4, "train.seq_len": 16},
        **{"eval.tokens": 200, "eval.samples": 0, "train.steps": 8, "train.compile": "off"},
        **{"checkpoint.every": 4, "backend": backend, "stochastic_depth.drop": 0.5},
    }

    def run(name: str) -> Run:
        config = load(
            "tiny", plugins="stochastic_depth", settings=settings, data=tmp_path / "text.txt"
        )
        return Run(build_plan(config), out=tmp_path / name, cache=tmp_path / "cache")

    run("whole").train()
    with run("broken") as first:
        steps = first.steps()
        while not (isinstance(event := next(steps), Stepped) and event.step == 3):
            pass
        first.save()
    Run.open(tmp_path / "broken", cache=tmp_path / "cache").train()
    ours, theirs = (
        chosen_or_refuse(tmp_path / n, print, step=8).arrays() for n in ("broken", "whole")
    )
    assert [key for key in theirs if not np.array_equal(ours[key], theirs[key])] == []
