"""Loss scaling: both frameworks follow the same rule, over any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from minillm_core.backends.mlx import scaler  # noqa: E402
from minillm_core.backends.torch.scaler import INTERVAL, LARGEST, START, LossScaler  # noqa: E402

SKIPPED = st.lists(st.booleans(), max_size=40)
SCALES = st.sampled_from([1.0, 2.0, START, LARGEST])
GOOD = st.sampled_from([0.0, 3.0, INTERVAL - 2.0, INTERVAL - 1.0])


def by_hand(scale: float, good: float, history: list[bool]) -> tuple[float, float, float]:
    skipped = 0.0
    for found in history:
        if found:
            scale, good, skipped = max(scale / 2, 1.0), 0.0, skipped + 1
        else:
            good += 1
            if good >= INTERVAL:
                scale, good = min(scale * 2, LARGEST), 0.0
    return scale, good, skipped


@given(history=SKIPPED, scale=SCALES, good=GOOD)
def test_both_follow_the_rule(history: list[bool], scale: float, good: float) -> None:
    ours = LossScaler(torch.device("cpu"))
    ours.scale.fill_(scale)
    ours.good.fill_(good)
    theirs = scaler.start() | {"scale": mx.array(scale), "good": mx.array(good)}
    for found in history:
        ours.judge(torch.tensor(float(found)))
        theirs = scaler.judge(theirs, mx.array(float(found)))
    expected = by_hand(scale, good, history)
    names = ("scale", "good", "skipped")
    assert tuple(ours.arrays()[name].item() for name in names) == expected
    assert tuple(theirs[name].item() for name in names) == expected
