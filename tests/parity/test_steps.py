"""Tests that twenty steps on both frameworks agree within rounding.

B = 2, T = 64, learning rates 1e-3 and 0.02 (muon), with weight decay and clipping on: every plugin
of the repository, and all at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tools.every_plugin import Form, all_at_once, forms, together

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

STEPS = 20
SETTINGS = {"train_rows": 2, "train_seq_len": 64, "train_steps": STEPS, "train_lr": 1e-3}


def perturbed(run: Any) -> Any:
    """Perturb every weight of a run by 6e-8 of itself, up or down."""
    rng = np.random.default_rng(11)
    arrays = run.arrays()
    for name, value in arrays.items():
        if name.startswith("model."):
            off = 1 + 6e-8 * rng.choice([-1.0, 1.0], value.shape)
            arrays[name] = (value * off).astype(np.float32)
    run.load(arrays)
    return run


def assert_together(lab: Any, plan: Any) -> None:
    steps = [[lab.completed(plan, lab.batch(plan, seed))] for seed in range(STEPS)]
    ours = np.array(lab.losses(lab.trainer(plan, "torch"), plan, steps))
    moved = np.array(lab.losses(perturbed(lab.trainer(plan, "torch")), plan, steps))
    theirs = np.array(lab.losses(lab.trainer(plan, "mlx"), plan, steps))
    divergence = np.abs(moved - ours).max()
    print(f"apart {np.abs(theirs - ours).max():.1e}, from itself {divergence:.1e}")
    assert divergence < 1e-3  # otherwise the bound would be meaningless
    assert ours[-3:].mean() < ours[:3].mean() - 0.01  # the loss falls
    assert np.abs(theirs - ours).max() <= max(1e-5, 3 * divergence)


def test_steps_stay_together(lab: Any) -> None:
    plan = lab.plan(**SETTINGS)
    assert plan.config.train.clip == 1.0
    assert plan.config.train.weight_decay == 0.1
    assert_together(lab, plan)


def each_form() -> list[Any]:
    """List every plugin in each form: nightly where the test of all plugins has it, further forms slow."""
    inside, firsts = together(), {one.name: one for one in reversed(forms())}

    def marks(form: Form) -> Any:
        if form in inside:
            return pytest.mark.nightly
        return () if form == firsts[form.name] else pytest.mark.slow

    return [pytest.param(one, id=str(one), marks=marks(one)) for one in forms()]


@pytest.mark.broad(4)
@pytest.mark.parametrize("form", each_form())
def test_steps_with_a_plugin_stay_together(lab: Any, form: Form) -> None:
    if form.left_out:
        pytest.skip(f"{form.name}: {form.left_out}")
    assert_together(lab, lab.plan(*form.names, **SETTINGS, **form.settings))


@pytest.mark.slow
def test_steps_with_all_plugins_stay_together(lab: Any) -> None:
    names, settings = all_at_once()
    assert len(names) >= 20
    assert_together(lab, lab.plan(*names, **SETTINGS, **settings, model_layers=3))


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("muon", "paired_heads")], ids=["plain", "with both"])
def test_steps_of_preset_tiny_stay_together(lab: Any, names: Iterable[str]) -> None:
    assert_together(lab, lab.tiny(*names, **SETTINGS))
