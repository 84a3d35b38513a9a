"""Twenty steps on both frameworks stay together, as far as rounding lets a run stay with itself.

B = 2, T = 64, learning rates 1e-3 and 0.02 (muon), with weight decay and clipping on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

STEPS = 20
SETTINGS = {"train_rows": 2, "train_seq_len": 64, "train_steps": STEPS, "train_lr": 1e-3}
PLUGINS = [(), ("muon",), ("paired_heads",), ("muon", "paired_heads")]

every_plugin = pytest.mark.parametrize(
    "names", PLUGINS, ids=lambda names: "+".join(names) or "plain"
)


def perturbed(run: Any) -> Any:
    """The run with every weight off by 6e-8 of itself, up or down."""
    rng = np.random.default_rng(11)
    moved = {
        name: (value * (1 + 6e-8 * rng.choice([-1.0, 1.0], value.shape))).astype(np.float32)
        for name, value in run.arrays().items()
        if name.startswith("model.")
    }
    run.load(moved)
    return run


def assert_together(lab: Any, plan: Any) -> None:
    steps = [[lab.batch(plan, seed)] for seed in range(STEPS)]
    ours = np.array(lab.losses(lab.trainer(plan, "torch"), plan, steps))
    moved = np.array(lab.losses(perturbed(lab.trainer(plan, "torch")), plan, steps))
    theirs = np.array(lab.losses(lab.trainer(plan, "mlx"), plan, steps))
    divergence = np.abs(moved - ours).max()
    print(f"apart {np.abs(theirs - ours).max():.1e}, from itself {divergence:.1e}")
    assert divergence < 1e-3  # else the bound would say nothing
    assert ours[-3:].mean() < ours[:3].mean() - 0.01  # it learns
    assert np.abs(theirs - ours).max() <= max(1e-5, 3 * divergence)


@every_plugin
def test_steps_stay_together(lab: Any, names: Iterable[str]) -> None:
    plan = lab.plan(*names, **SETTINGS)
    assert plan.config.train.clip == 1.0
    assert plan.config.train.weight_decay == 0.1
    assert_together(lab, plan)


@pytest.mark.slow
@every_plugin
def test_steps_of_preset_tiny_stay_together(lab: Any, names: Iterable[str]) -> None:
    assert_together(lab, lab.tiny(*names, **SETTINGS))
