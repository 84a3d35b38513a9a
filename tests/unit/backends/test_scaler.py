"""Tests of loss scaling: both frameworks follow the same rule, over any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from minillm_core.backends.mlx.ops import MLXOps  # noqa: E402
from minillm_core.backends.steps import (  # noqa: E402
    INTERVAL,
    LARGEST_SCALE,
    START_SCALE,
    loss_scale,
    next_loss_scale,
)
from minillm_core.backends.torch.ops import TorchOps  # noqa: E402

SKIPPED = st.lists(st.booleans(), max_size=40)
SCALES = st.sampled_from([1.0, 2.0, START_SCALE, LARGEST_SCALE])
GOOD = st.sampled_from([0.0, 3.0, INTERVAL - 2.0, INTERVAL - 1.0])


def by_hand(scale: float, good: float, history: list[bool]) -> tuple[float, float, float]:
    skipped = 0.0
    for found in history:
        if found:
            scale, good, skipped = max(scale / 2, 1.0), 0.0, skipped + 1
        else:
            good += 1
            if good >= INTERVAL:
                scale, good = min(scale * 2, LARGEST_SCALE), 0.0
    return scale, good, skipped


@given(history=SKIPPED, scale=SCALES, good=GOOD)
def test_both_follow_the_rule(history: list[bool], scale: float, good: float) -> None:
    expected = by_hand(scale, good, history)
    for ops in (TorchOps(), MLXOps()):
        state = loss_scale(ops)
        state |= {"scale": ops.scalar(scale), "good": ops.scalar(good)}
        for found in history:
            state = next_loss_scale(ops, state, ops.scalar(float(found)))
        assert tuple(state[name].item() for name in ("scale", "good", "skipped")) == expected
