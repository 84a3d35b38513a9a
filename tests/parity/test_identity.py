"""Techniques that change nothing before the first step: alone, and all of them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.backends.numpy.model import materialise
from minillm_core.plan import Plan
from minillm_core.plugins.discover import installed_plugins
from minillm_core.plugins.find import find

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

Batch = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def identities() -> list[str]:
    """The installed plugins that say so."""
    names = [entry.name for entry in installed_plugins()]
    found = [name for name in names if find(name).cls.manifest.identity_at_init]
    assert len(found) > 2
    return found


def test_logits_are_the_plain_models_to_the_bit(lab: Any, identities: list[str]) -> None:
    plain = lab.plan()
    expected = hidden(plain, lab.batch(plain))
    for names in (*((name,) for name in identities), tuple(identities)):
        plan = lab.plan(*names)
        got = hidden(plan, lab.completed(plan, lab.batch(plan)))
        np.testing.assert_array_equal(got, expected, err_msg=str(names))


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_first_loss_is_the_plain_models(lab: Any, identities: list[str], backend: str) -> None:
    losses = []
    for plan in (lab.plan(), lab.plan(*identities)):
        steps = [[lab.completed(plan, lab.batch(plan))]]
        losses += lab.losses(lab.trainer(plan, backend), plan, steps)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def hidden(plan: Plan, batch: Batch) -> np.ndarray:
    """(B, T, C) before the head, in float64."""
    return materialise(plan, 0).hidden(dict(batch), plan.values(1.0))[0]
