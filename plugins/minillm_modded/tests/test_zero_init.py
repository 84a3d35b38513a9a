"""Tests of zero-initialised parameters, and that every block then starts as the identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_modded.relu2 import ReLU2
from minillm_modded.zero_init import ZeroInit

CASES: list[tuple[dict[str, bool], set[str]]] = [
    ({}, {"attention.o", "mlp.down"}),
    ({"attention": False}, {"mlp.down"}),
    ({"mlp": False, "head": True}, {"attention.o", "head"}),
]


@pytest.mark.parametrize(("options", "roles"), CASES)
@pytest.mark.parametrize("others", [(), (ReLU2(layers=Layers([1, 2])),)])
def test_these_roles_and_no_others_start_at_zero(
    lab: Any, options: dict[str, bool], roles: set[str], others: tuple[Any, ...]
) -> None:
    plan = lab.plan(ZeroInit(**options), *others)
    net = lab.model(plan, moved=False).net
    for name, info in plan.parameters.items():
        value = net
        for part in name.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        assert (not np.any(value)) == (info.role in roles), name


def test_the_stream_is_the_embedding_at_first(lab: Any) -> None:
    model = lab.model(lab.plan(ZeroInit()), moved=False)
    batch = lab.batch()
    embedded = model.net.embedding(batch["ids"])
    np.testing.assert_array_equal(model.hidden(batch), model.net.norm(embedded))
    plain = lab.model(lab.plan(), moved=False)
    assert np.abs(plain.hidden(batch) - model.hidden(batch)).max() > 0.01


def test_a_tied_head_cannot_start_at_zero(lab: Any) -> None:
    with pytest.raises(PlanError, match="of the role 'head', but the model has none"):
        lab.plan(ZeroInit(head=True), tied=True)


def test_something_has_to_start_at_zero(lab: Any) -> None:
    with pytest.raises(PlanError, match="has nothing to do"):
        lab.plan(ZeroInit(attention=False, mlp=False))
