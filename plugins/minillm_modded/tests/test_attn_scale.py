"""Tests of the attention scale against an explicit softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_modded.attn_scale import AttnScale


def test_the_records_scale_at_its_head_size() -> None:
    assert AttnScale().factor * 128**-0.5 == pytest.approx(0.12, abs=3e-4)
    assert AttnScale(factor=1.13).factor * 128**-0.5 == pytest.approx(0.1, abs=3e-4)


def test_the_softmax_is_as_sharp_as_said(lab: Any, rng: Any) -> None:
    plan = lab.plan(AttnScale(factor=3.0, layers=Layers([1])), kv_heads=4)
    model = lab.model(plan)
    layers = [block.attention for block in model.net.layers]
    q, k, v = rng.standard_normal((3, 1, 5, 4, 8))
    for layer, factor in zip(layers[:2], (1.0, 3.0), strict=True):
        got = layer.ops.attention(q, k, v, scale=layer.scale and layer.scale.of({}))
        logits = factor * np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8)
        logits[..., np.triu_indices(5, 1)[0], np.triu_indices(5, 1)[1]] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        np.testing.assert_allclose(got, np.einsum("bhts,bshd->bthd", p, v), rtol=1e-10)
