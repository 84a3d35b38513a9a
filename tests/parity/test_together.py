"""Tests of every technique at once, as far as compatible: one function on NumPy and both frameworks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm_core.nn.module import declared
from minillm_core.nn.param import Param
from minillm_core.optim.groups import Member, groups_of
from minillm_core.plan import Plan
from minillm_core.plugins.discover import installed_plugins
from minillm_core.plugins.manager import find
from minillm_kit import materialise
from tools.every_plugin import APART, MIXERS, OPTIONS, WHOLE, Form

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

SHAPING = {"build_attention", "build_model", "compute_loss"}


@pytest.fixture(scope="module")
def everything(lab: Any) -> Plan:
    """Plan all installed plugins that change the model or the loss, with AdamW."""
    found = {entry.name: find(entry.name).cls for entry in installed_plugins()}
    shaping = [name for name, cls in found.items() if SHAPING & set(cls.hooks)]
    names = [name for name in shaping if name not in (*MIXERS, *WHOLE) and not Form(name).left_out]
    shorter = Form("windows", OPTIONS["windows"][0]).settings  # shorter than a row of the lab
    settings = {**shorter, **APART}
    apart = {key: value for key, value in settings.items() if key.partition(".")[0] in names}
    plan = lab.plan(*names, train_clip=0.0, model_layers=3, **apart)
    rule = lab.plan().groups[0].rule
    members = (Member(name, p.shape, 1.0, 1.0) for name, p in plan.parameters.items())
    return replace(plan, groups=groups_of({one.name: (rule, one) for one in members}))


@pytest.fixture(scope="module")
def moved(lab: Any, everything: Plan) -> dict[str, np.ndarray]:
    """Perturb parameters from their initial values, so that those starting at 0 have an effect."""
    # at two of the first ten points one number's gradient nearly cancels, to 1e-4
    rng, found = np.random.default_rng(0), {}
    for name, value in lab.trainer(everything, "torch").arrays().items():
        noise = rng.standard_normal(value.shape).astype(np.float32)
        found[name] = value + np.float32(0.1) * noise if name.startswith("model.") else value
    return found


def test_losses_and_gradients_are_the_same_everywhere(
    lab: Any, everything: Plan, moved: dict[str, np.ndarray]
) -> None:
    assert len(everything.plugins) >= 15
    batch = lab.completed(everything, lab.batch(everything, unsupervised=2))
    found = {}
    for backend in ("torch", "mlx"):
        run = lab.trainer(everything, backend)
        run.load(moved)
        found[backend] = lab.gradients(run, everything, [batch])
    net = materialise(everything, 0)
    for name, module, attribute, _ in declared(net, Param):
        setattr(module, attribute, moved[f"model.{name}"].astype(np.float64))
    sums = net(dict(batch), lab.values_of(everything, [batch])).sums
    expected = float(sums[0]) / lab.supervised([batch])
    for loss, _ in found.values():
        assert loss == pytest.approx(expected, rel=1e-5)
    lab.assert_gradients(found["mlx"][1], found["torch"][1], overall=3e-6)
    still = [name for name, grad in found["torch"][1].items() if not np.any(grad)]
    assert still == []


def test_decoding_in_pieces_is_the_whole_pass(
    lab: Any, everything: Plan, moved: dict[str, np.ndarray]
) -> None:
    run = lab.trainer(everything, "torch")
    run.load(moved)
    batch = lab.completed(everything, lab.batch(everything), phase="decode")
    row = {name: array[:1] for name, array in batch.items()}
    decoding, at = run.decoding(), 0
    for size in (5, 1, 1, 3, 1):
        logits = decoding.feed({name: array[:, at : at + size] for name, array in row.items()})
        at += size
        whole = run.next_logits({name: array[:, :at] for name, array in row.items()})
        np.testing.assert_allclose(logits, whole, atol=2e-5)
