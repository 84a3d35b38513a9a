"""Tests of exclusive self-attention against its definition, head by head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_modded.paired_heads import PairedHeads
from minillm_modded.xsa import XSA, Exclude


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_a_head_loses_its_share_along_the_tokens_own_value(
    node: Any, rng: Any, heads: int, kv_heads: int
) -> None:
    sizes = SimpleNamespace(heads=heads, kv_heads=kv_heads)
    exclude = node(Exclude, geometry=sizes, lr_mul=1.0)
    y, v = rng.standard_normal((2, 3, heads, 5)), rng.standard_normal((2, 3, kv_heads, 5))
    got = exclude(y, v)
    for head in range(heads):
        unit = v[:, :, head // (heads // kv_heads)]
        unit = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
        along = (y[:, :, head] * unit).sum(-1, keepdims=True) * unit
        expected = y[:, :, head] - np.tanh(exclude.alpha[head]) * along
        np.testing.assert_allclose(got[:, :, head], expected, rtol=1e-7, atol=1e-9)


def test_at_full_strength_nothing_is_left_along_it(node: Any, rng: Any) -> None:
    exclude = node(Exclude, geometry=SimpleNamespace(heads=2, kv_heads=2), lr_mul=1.0)
    exclude.alpha = np.full(2, 30.0)
    y, v = rng.standard_normal((1, 4, 2, 5)), rng.standard_normal((1, 4, 2, 5))
    assert np.abs((exclude(y, v) * v).sum(-1)).max() < 1e-8
    np.testing.assert_array_equal(exclude(y, np.zeros_like(v)), y)


def test_it_changes_nothing_at_first(lab: Any) -> None:
    batch = lab.batch()
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((XSA(),), ()))
    np.testing.assert_array_equal(ours.hidden(batch), plain.hidden(batch))


def test_it_is_refused_where_heads_are_paired(lab: Any) -> None:
    with pytest.raises(PlanError) as refused:
        lab.plan(XSA(), PairedHeads())
    assert "no longer line up" in refused.value.what
    assert "leave out 'pairedheads' or 'xsa'" in str(refused.value.fix)
    assert lab.plan(XSA(layers=Layers([1, 3])), PairedHeads(layers=Layers([0, 2])))
