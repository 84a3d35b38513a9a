"""Tests of stages as data: arguments are checked at construction, and bound at run time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from minillm_core.optim.schedules import scheduled
from minillm_core.optim.stage import Rule, stage

OPS = object()


def scaled(ops: Any, update: Any, param: Any, state: Any, *, by: float, lr_mul: Any) -> Any:
    return update * by * lr_mul, {"seen": update}


def counted(ops: Any, update: Any, param: Any, state: Any, *, updates: Any, extra: int = 1) -> Any:
    return update * updates * extra, state


def factored(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:1]


def test_arguments_are_constants_values_or_supplied() -> None:
    draft = stage(scaled, by=scheduled(0.5))
    named = draft.named("mine")
    assert named.values == (("by", "mine.by"),)
    update, state = named.apply(
        OPS, np.ones(3), np.zeros(3), {}, {"mine.by": 0.5, "lr_mul": 4.0, "updates": 9}
    )
    assert update.tolist() == [2.0, 2.0, 2.0]
    assert state["seen"].tolist() == [1.0, 1.0, 1.0]
    constant = stage(scaled, by=3.0).named("mine")
    assert constant.values == ()
    assert constant.apply(OPS, np.ones(1), np.zeros(1), {}, {"lr_mul": 1.0})[0].tolist() == [3.0]


def test_updates_are_counted_by_the_core() -> None:
    planned = stage(counted).named("mine")
    assert planned.supplied == ("updates",)
    assert planned.apply(OPS, np.ones(1), np.ones(1), {}, {"updates": 7.0})[0].tolist() == [7.0]


def test_state_is_like_the_parameter_a_scalar_or_a_function_of_its_shape() -> None:
    state = {"moment": "like", "count": "scalar", "rows": factored}
    draft = stage(counted, state=state, needs="matrix")
    shapes = {entry: one.shape for entry, one in draft.stage.state_arrays((4, 3)).items()}
    assert shapes == {"moment": (4, 3), "count": (1, 1), "rows": (4,)}
    assert draft.stage.needs == "matrix"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": 1.0, "wd_mul": 2.0}, "scaled takes no argument 'wd_mul'"),
        ({"by": 1.0, "lr_mul": 2.0}, "scaled takes no argument 'lr_mul'"),  # supplied by the core
        ({}, "scaled needs the argument 'by'"),
        ({"by": {1}}, "is not JSON"),
        ({"by": float("inf")}, "is not JSON"),
        ({"by": 1.0, "needs": "global"}, "needs='global': one of element, matrix"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage(scaled, **arguments)


def swapped(ops: Any, param: Any, update: Any, state: Any) -> Any:
    return update, state


def test_swapped_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"takes \(ops, param, .*not \(ops, update, param, state\)"
    ):
        stage(swapped)


def test_a_closure_is_refused() -> None:
    def local(ops: Any, update: Any, param: Any, state: Any) -> Any:
        return update, state

    for function in (local, lambda ops, update, param, state: (update, state)):
        with pytest.raises(ValueError, match="no lambda, no closure"):
            stage(function)


def test_a_rule_is_data_and_knows_what_it_needs() -> None:
    plain = Rule("a", "one", (("scale", "one", stage(scaled, by=2.0).named("a")),))
    whole = Rule("b", "one", (("scale", "two", stage(counted, needs="matrix").named("b")),))
    assert (plain.stacked, whole.stacked) == (False, True)
    assert plain.accepts("by")
    assert not plain.accepts("by", "beta1")
    data = json.loads(json.dumps(plain.data()))
    assert data["stages"][0]["reference"].endswith(":scaled")
    assert data["stages"][0]["arguments"] == {"by": 2.0}
