"""Tests of uniform initial values of v and o; all others are unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_modded.value_init import ValueInit
from minillm_modded.zero_init import ZeroInit


def matrices(lab: Any, *plugins: Any, **sizes: Any) -> tuple[Any, dict[str, np.ndarray]]:
    plan = lab.plan(*plugins, **sizes)
    net, found = lab.model(plan, moved=False).net, {}
    for name in plan.parameters:
        value = net
        for part in name.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        found[name] = np.asarray(value)
    return plan, found


@pytest.mark.parametrize("size", [0.5, 0.2])
def test_they_are_uniform_with_the_records_deviation(lab: Any, size: float) -> None:
    sizes = {"dim": 128, "heads": 4, "kv_heads": 4, "layers": 2}
    plan, ours = matrices(lab, ValueInit(size=size), **sizes)
    _, plain = matrices(lab, **sizes)
    for name, info in plan.parameters.items():
        if info.role not in ("attention.v", "attention.o"):
            np.testing.assert_array_equal(ours[name], plain[name])
            continue
        std, value = size * 128**-0.5, ours[name]
        assert value.std() == pytest.approx(std, rel=0.02)
        assert np.abs(value).max() <= 3**0.5 * std
        assert np.abs(value).max() > 0.999 * 3**0.5 * std
        assert np.mean(value**4) / value.var() ** 2 == pytest.approx(1.8, rel=0.02)  # uniform


def test_beside_zero_init_one_of_them_has_the_projection(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"attention\.o"):
        lab.plan(ValueInit(), ZeroInit())
    plan, ours = matrices(lab, ValueInit(), ZeroInit(attention=False))
    zero = {info.role for name, info in plan.parameters.items() if not ours[name].any()}
    assert zero == {"mlp.down"}
