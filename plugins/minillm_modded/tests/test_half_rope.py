"""Tests of half-truncated rotary embedding, feature by feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_kit import NumPyOps
from minillm_modded.half_rope import HalfRope, half_truncated


def test_frequencies_fall_to_one_over_the_base_and_then_rest() -> None:
    np.testing.assert_allclose(
        half_truncated(16, 1000.0), [1.0, 0.1, 0.01, 0.001, 0, 0, 0, 0], rtol=1e-12
    )
    theta = half_truncated(128, 1024.0)
    np.testing.assert_allclose(theta[1:32] / theta[:31], 1024.0 ** (-1 / 31), rtol=1e-12)


def test_half_of_the_features_turn_by_their_angle(lab: Any, rng: Any) -> None:
    rope = lab.model(lab.plan(HalfRope(), dim=64), moved=False).net.layers[0].attention.rope
    q, k = rng.standard_normal((1, 6, 4, 16)), rng.standard_normal((1, 6, 2, 16))
    for got, x in zip(NumPyOps().rotate(q, k, rope(None)), (q, k), strict=True):
        for pair in range(8):
            still = pair >= 4
            z = x[..., pair] + 1j * x[..., pair + 8]
            angle = 0.0 if still else 1024.0 ** (-pair / 3)
            turned = z * np.exp(1j * angle * np.arange(6))[None, :, None]
            np.testing.assert_allclose(got[..., pair], turned.real, atol=1e-6)
            np.testing.assert_allclose(got[..., pair + 8], turned.imag, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"dim": 40}, {"dim": 16}])
def test_a_head_must_have_pairs_to_halve(lab: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="half_rope cannot halve"):
        lab.plan(HalfRope(), **sizes)


def test_layers_that_are_not_named_keep_their_rotation(lab: Any) -> None:
    blocks = lab.plan(HalfRope(layers=Layers([0]), base=64.0)).spec.blocks
    assert blocks[0].attention.rope.frequencies is not None
    assert blocks[1].attention.rope.frequencies is None
    np.testing.assert_allclose(blocks[0].attention.rope.radians(8), [1, 1 / 64, 0, 0])
