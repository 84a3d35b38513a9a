"""Tests that a parameter in blocks of rows is updated, stored and viewed like that many parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import PlanError, Plugin, option, plateaus, stage
from minillm_core.nn.reference import Function, reference_of
from minillm_core.optim.groups import Group, Member
from minillm_core.optim.stage import Rule
from minillm_core.optim.update import by_parameter, initial_state, update
from minillm_core.optim.views import views_of
from minillm_kit import NumPyFramework, NumPyOps

OPS: Any = NumPyOps()


def of_rows(shape: tuple[int, int], width: int) -> tuple[int, int]:
    """Return one number per row, ``width`` times."""
    return shape[0], width


def measured(
    ops: Any, update: Any, param: Any, state: Any, *, width: int, lr_mul: Any, layer_grad_norm: Any
) -> Any:
    """Return everything that differs by matrix: norm, rows, count, factor of its parameter and of its layer."""
    norm = ops.sqrt(ops.sum(ops.square(update), (-2, -1), keepdims=True))
    rows = ops.mean(update, -1, keepdims=True) + state["rows"]
    mean = state["mean"] * 0.5 + update * 0.5
    made = update / norm + mean + ops.mean(rows, -1, keepdims=True)
    count = state["count"] + norm
    new = {"rows": rows, "mean": mean, "narrow": update + state["narrow"] * 0.5, "count": count}
    return (made + state["narrow"] * count) * lr_mul / layer_grad_norm, new


def written(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return param - update * 0.1, state


def viewed(ops: Any, param: Any, state: Any, *, share: float) -> Any:
    """Return the mean, weighted by a count per matrix."""
    return param + share * state["scale.mean"] * state["scale.count"]


STATE = {"rows": of_rows, "mean": "like", "narrow": "like:int8", "count": "scalar"}
RULE = Rule(
    "rule",
    "test",
    (
        ("scale", "test", stage(measured, state=STATE, needs="matrix", width=3).named("rule")),
        ("write", "test", stage(written).named("rule")),
    ),
)
VIEW = Function("test", reference_of(viewed), (("share", 0.5),))


def run(
    group: Group, params: Any, grads: Any, values: dict[str, float], whole: bool = False
) -> Any:
    groups = {"0": group}
    state = initial_state(groups, np.zeros)

    def given(arrays: Any) -> Any:
        return {**arrays, "0": np.stack([arrays[m.name] for m in group.members])}

    for step, grad in enumerate(grads, 1):
        params, grad = (given(params), given(grad)) if whole else (params, grad)
        params, state = update(OPS, groups, params, grad, 0.5, state, float(step), values)
        if whole:
            params = {m.name: one for m, one in zip(group.members, params["0"], strict=True)}
    views = dict(views_of(NumPyFramework(), groups, params, state))
    return params, by_parameter(groups, state), views


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(2, 4),
    rows=st.integers(1, 5),
    columns=st.integers(1, 130),
    factors=st.sampled_from([(1.0, 1.0), (1.0, 2.0), ("half", 2.0)]),
    seed=st.integers(0, 2**32),
)
def test_a_parameter_in_blocks_is_several(
    blocks: int, rows: int, columns: int, factors: Any, seed: int
) -> None:
    rng, names, values = np.random.default_rng(seed), ("layers.0.a", "layers.0.b"), {"half": 0.5}
    shape = blocks * rows, columns
    whole = Group(
        RULE,
        tuple(
            Member(name, shape, factor, 1.0, view=VIEW, blocks=blocks)
            for name, factor in zip(names, factors, strict=True)
        ),
    )
    parts = Group(
        RULE,
        tuple(
            Member(f"{member.name}.{i}", (rows, columns), member.lr_mul, 1.0, view=VIEW)
            for member in whole.members
            for i in range(blocks)
        ),
    )

    def cut(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"{n}.{i}": x for n, a in arrays.items() for i, x in enumerate(np.split(a, blocks))}

    drawn = [{name: rng.standard_normal(shape) for name in names} for _ in range(4)]
    got, kept, views = run(whole, drawn[0], drawn[1:], values)
    want, each, looks = run(parts, cut(drawn[0]), [cut(one) for one in drawn[1:]], values)
    for mine, theirs in ((got, want), (views, looks)):
        for name, array in cut(mine).items():
            # the layer's norm is a sum over other arrays
            np.testing.assert_allclose(array, theirs[name], rtol=1e-11, atol=1e-13)
    for name, array in kept.items():
        assert array.shape[0] == blocks
        for index, part in enumerate(array):
            np.testing.assert_array_equal(part, each[f"{name}.{index}"])
    stacked, same, _ = run(
        whole, drawn[0], drawn[1:], values, whole=True
    )  # one array for the group
    for one, other in ((got, stacked), (kept, same)):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])


class Splits(Plugin, api=1):
    """A rule that works on matrices, or on none, and a split of one of its parameters, or of another's."""

    needs: str = option("matrix", help="element or matrix")
    blocks: int = option(2, help="of rows")
    role: str = option("mlp.up", help="of what is split")
    rule: str = option("plain", help="whose rows it splits")
    frozen: bool = option(False, help="what is split is frozen")

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.rule("plain", lr=0.1, scale=stage(halved, needs=self.needs))
        if self.frozen:
            optimizer.freeze(lambda _, p: p.role == "mlp.up", over=True)
        else:
            optimizer.assign("plain", lambda _, p: p.role == "mlp.up")
        optimizer.split(self.rule, lambda _, p: p.role == self.role, self.blocks)


def halved(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update * 0.5, state


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frozen": True}, "splits rows of .* freezes"),
        ({"needs": "element"}, "into matrices, but it follows the rule 'plain'"),
        ({"role": "mlp.down"}, "into matrices, but it follows the rule 'adamw'"),
        ({"rule": "muon"}, "builds on the rule 'muon', which no active plugin provides"),
        ({"blocks": 7}, "in 7 blocks of rows"),
        ({"blocks": 0}, "in 0 blocks of rows"),
        ({"role": "norm", "blocks": 1}, "in 1 blocks of rows"),
        ({"role": "nothing"}, "opt.split: no parameter fits"),
    ],
)
def test_what_cannot_be_split_is_refused(planned: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(splits=Splits(**options))


def test_blocks_are_in_the_plan_and_counted(planned: Any) -> None:
    plan, whole = planned(splits=Splits()), planned(splits=Splits(blocks=1))
    members = [m for g in plan.data()["optimizer"]["groups"] for m in g["members"] if "blocks" in m]
    assert {m["name"].split(".")[-2] for m in members} == {"up"}
    assert "'blocks'" not in str(whole.data()["optimizer"])
    assert plan.hash != whole.hash
    assert ("splits", "opt.split") in {(one.owner, one.slot) for one in plan.placements}


class Curve(Plugin, api=1):
    """A schedule that is not a number somewhere."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.set(lambda _, p: p.role == "norm", lr_mul=plateaus((0, 1.0), (0.5, 2.0)))
        optimizer.schedule(endless)


def endless(x: float) -> float:
    return 1.0 if x < 1 else float("inf")


def test_a_schedule_that_is_not_finite_is_refused(planned: Any) -> None:
    with pytest.raises(PlanError, match=r"slot opt.schedule: inf at 1 of what follows the warm-up"):
        planned(curve=Curve())
