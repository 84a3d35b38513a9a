"""Tests of techniques without effect before the first step, exactly: each alone, and all together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.plan import Plan
from minillm_core.plugins.discover import installed_plugins
from minillm_kit import materialise
from tools.every_plugin import WHOLE, Form, forms

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

Batch = dict[str, np.ndarray]
SHAPING = {"build_attention", "build_model"}
"""Hooks of plugins that can change what the model computes before its first step."""
ODD = {"model_layers": 5, "model_heads": 2, "model_kv_heads": 1, "model_tied": True}


def declared() -> list[str]:
    """List the installed plugins that declare it, including third-party ones; read without import."""
    found = [(one.name, one.manifest) for one in installed_plugins()]
    return [name for name, manifest in found if manifest and manifest.identity_at_init]


def sets() -> list[Any]:
    """List each alone, in every form, and all together."""
    found = declared()
    tried = [one for one in forms() if one.name in found]
    ours = {one.name for one in tried}
    alone = [*tried, *(Form(name) for name in found if name not in ours)]
    # mixed into every layer's stream, mudd would claim slots that others add to
    options = {"mudd": {"ways": ["q", "v"]}}
    beside = [name for name in found if name not in WHOLE]
    together = tuple(Form(name, options.get(name, {})) for name in beside)
    return [*(pytest.param((one,), id=str(one)) for one in alone), pytest.param(together, id="all")]


each_set = pytest.mark.parametrize("chosen", sets())


def plans(lab: Any, chosen: tuple[Form, ...], **sizes: Any) -> tuple[Plan, Plan]:
    """Return the plain plan, and the plan with the plugins and their requirements."""
    names = sorted({name for one in chosen for name in one.names})
    options = {key: value for one in chosen for key, value in one.settings.items()}
    return lab.plan(**sizes), lab.plan(*names, **options, **sizes)


def test_there_are_some() -> None:
    assert len(declared()) >= 4


@each_set
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["small", "odd"])
def test_features_are_the_plain_models_to_the_bit(
    lab: Any, chosen: tuple[Form, ...], sizes: dict[str, Any]
) -> None:
    plain, plan = plans(lab, chosen, **sizes)
    np.testing.assert_array_equal(features(lab, plan), features(lab, plain))


@pytest.mark.broad(6)
@each_set
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_logits_and_the_first_loss_are_the_plain_models_to_the_bit(
    lab: Any, chosen: tuple[Form, ...], backend: str
) -> None:
    logits, losses = [], []
    for plan in plans(lab, chosen):
        batch = lab.completed(plan, lab.batch(plan, unsupervised=2))
        run = lab.trainer(plan, backend)
        logits.append(run.next_logits({name: array[:1] for name, array in batch.items()}))
        losses += lab.losses(run, plan, [[batch]])
    np.testing.assert_array_equal(logits[1], logits[0])
    assert losses[1] == losses[0]


@pytest.mark.slow
def test_those_that_change_nothing_say_so(lab: Any) -> None:
    """No plugin is missing in the tests above for lack of the declaration.

    ``fused_swiglu`` is the plain MLP by kernels of CUDA, and computes in its plain form here.
    """
    silent = []
    for one in forms():
        if one.name in declared() or not SHAPING & set(one.cls.hooks):
            continue
        plain, plan = plans(lab, (one,), train_seq_len=64)
        # also at the end, whose values evaluation uses: only then do layers run twice
        same = (np.array_equal(features(lab, plan, at), features(lab, plain)) for at in (0.0, 1.0))
        if all(same):
            silent.append(str(one))
    assert silent == ["fused_swiglu"]


def features(lab: Any, plan: Plan, at: float = 1.0) -> np.ndarray:
    """Compute (B, T, C) before the head, in float64, at the fraction ``at`` of the run."""
    batch = lab.completed(plan, lab.batch(plan))
    return materialise(plan, 0).hidden(dict(batch), plan.values(at))[0]
