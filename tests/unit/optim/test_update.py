"""Tests of the update against torch's AdamW and clipping, in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.errors import PluginCodeError
from minillm_core.optim.groups import Group, Member, groups_of
from minillm_core.optim.stage import Rule, stage
from minillm_core.optim.update import clip_factor, global_norm, initial_state, update
from minillm_core.plugins.builders.optimizer import core_rule
from minillm_kit import NumPyOps

OPS = NumPyOps()
SHAPES = {"a": (3, 4), "b": (5,), "c": (1,)}
Arrays = dict[str, np.ndarray]


def adamw(weight_decay: float, betas: tuple[float, float], **members: Any) -> dict[str, Group]:
    """Build groups with the core's rule; ``members`` hold fields that differ from 1."""
    train = SimpleNamespace(betas=betas, epsilon=1e-8, weight_decay=weight_decay, lr=1.0)
    stages = tuple(
        (anchor, "core", draft.named("train")) for anchor, draft in core_rule(train).items()
    )
    rule = Rule("adamw", "core", stages)
    fields = {name: {"lr_mul": 1.0, "wd_mul": 1.0, **members.get(name, {})} for name in SHAPES}
    made = {name: (rule, Member(name, SHAPES[name], **fields[name])) for name in SHAPES}
    return {str(i): group for i, group in enumerate(groups_of(made))}


def drawn(rng: np.random.Generator) -> Arrays:
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def run(groups: dict[str, Group], params: Arrays, grads: list[Arrays], lr: float) -> Arrays:
    state = initial_state(groups, np.zeros)
    for step, grad in enumerate(grads, 1):
        params, state = update(
            OPS, groups, params, grad, 1.0, state, np.float64(step), {"train.lr": lr}
        )
    return params


def torch_run(
    params: Arrays,
    grads: list[Arrays],
    make: Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer],
) -> Arrays:
    tensors = {n: torch.nn.Parameter(torch.tensor(p)) for n, p in params.items()}
    optimizer = make(tensors)
    for grad in grads:
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(grad[name])
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    lr=st.floats(1e-5, 0.5),
    weight_decay=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
    steps=st.integers(1, 6),
)
def test_adamw_is_torchs(
    seed: int, lr: float, weight_decay: float, betas: tuple[float, float], steps: int
) -> None:
    rng = np.random.default_rng(seed)
    params, grads = drawn(rng), [drawn(rng) for _ in range(steps)]
    got = run(adamw(weight_decay, betas), params, grads, lr)
    want = torch_run(
        params,
        grads,
        lambda tensors: torch.optim.AdamW(
            tensors.values(), lr=lr, betas=betas, weight_decay=weight_decay
        ),
    )
    for name in SHAPES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-12)


def test_factors_are_torchs_parameter_groups() -> None:
    rng = np.random.default_rng(0)
    params, grads = drawn(rng), [drawn(rng) for _ in range(4)]
    groups = adamw(
        0.3,
        (0.9, 0.95),
        a={"lr_mul": 5.0, "wd_mul": 0.0},
        b={"overrides": (("beta1", 0.5), ("beta2", 0.6))},
    )
    got = run(groups, params, grads, 0.01)
    want = torch_run(
        params,
        grads,
        lambda tensors: torch.optim.AdamW(
            [
                {"params": [tensors["a"]], "lr": 0.05, "weight_decay": 0.0},
                {"params": [tensors["b"]], "betas": (0.5, 0.6)},
                {"params": [tensors["c"]]},
            ],
            lr=0.01,
            betas=(0.9, 0.95),
            weight_decay=0.3,
        ),
    )
    for name in SHAPES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-12)


@given(seed=st.integers(0, 2**32), clip=st.floats(1e-3, 100), size=st.floats(1e-3, 1e3))
def test_clipping_is_torchs(seed: int, clip: float, size: float) -> None:
    grads = {name: grad * size for name, grad in drawn(np.random.default_rng(seed)).items()}
    norm = global_norm(OPS, grads.values())
    factor = clip_factor(OPS, norm, clip)
    tensors = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    for tensor, grad in zip(tensors, grads.values(), strict=True):
        tensor.data = tensor.data.double()
        tensor.grad = torch.tensor(grad)
    total = torch.nn.utils.clip_grad_norm_(tensors, clip)
    assert norm == pytest.approx(float(total), rel=1e-12)
    for tensor, grad in zip(tensors, grads.values(), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(grad * factor, tensor.grad.numpy(), rtol=1e-10)


def test_no_clipping_is_one() -> None:
    assert clip_factor(OPS, np.float64(1e9), 0.0) == 1.0


def test_the_factor_multiplies_every_gradient() -> None:
    rng = np.random.default_rng(1)
    params, grads, groups = drawn(rng), drawn(rng), adamw(0.1, (0.9, 0.95))
    state = initial_state(groups, np.zeros)
    args = (state, np.float64(1), {"train.lr": 0.1})
    halves, _ = update(OPS, groups, params, grads, 0.5, *args)
    given_halves, _ = update(OPS, groups, params, {n: g / 2 for n, g in grads.items()}, 1.0, *args)
    for name in SHAPES:
        np.testing.assert_array_equal(halves[name], given_halves[name])


def test_an_update_changes_nothing_that_it_was_given() -> None:
    rng = np.random.default_rng(2)
    params, grads, groups = drawn(rng), drawn(rng), adamw(0.1, (0.9, 0.95))
    state = initial_state(groups, np.zeros)
    before = {name: param.copy() for name, param in params.items()}
    _, new_state = update(OPS, groups, params, grads, 1.0, state, 1.0, {"train.lr": 0.1})
    for name in SHAPES:
        np.testing.assert_array_equal(params[name], before[name])
    for entries in state.values():
        assert all(not array.any() for held in entries.values() for array in held.values())
    assert {key: set(held) for key, held in new_state.items()} == {
        key: set(held) for key, held in state.items()
    }


def shifted(ops: Any, update: Any, param: Any, state: Any, *, by: Any, lr_mul: Any) -> Any:
    return param - update * by * lr_mul, state


def test_a_stack_is_updated_as_its_members_alone() -> None:
    rule = Rule(
        "whole", "one", (("write", "one", stage(shifted, needs="matrix", by=0.5).named("")),)
    )
    members = {name: Member(name, (2, 3), lr_mul, 1.0) for name, lr_mul in (("a", 1.0), ("b", 3.0))}
    (group,) = groups_of({name: (rule, member) for name, member in members.items()})
    assert group.state_arrays() == {}
    rng = np.random.default_rng(3)
    params = {name: rng.standard_normal((2, 3)) for name in members}
    grads = {name: rng.standard_normal((2, 3)) for name in members}
    seen: list[str] = []
    ops: Any = OPS
    new, state = update(ops, {"0": group}, params, grads, 1.0, {}, 1.0, {}, seen.append)
    for name, member in members.items():
        want = params[name] - grads[name] * 0.5 * member.lr_mul
        np.testing.assert_allclose(new[name], want, rtol=1e-12)
    assert state == {}
    assert seen == ["stage:whole.write"] * 2


def nothing(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return None


def shorter(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update[:1], state


def numbers(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return 0.5, state


def halved_state(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {"m": state["m"].astype(np.float32)}


def shrunk_state(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {"m": state["m"][:1]}


def no_state(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {}


def further_state(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {**state, "zz": update}


def narrow(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return (param - update).astype(np.float32), state


def inplace(ops: Any, update: Any, param: Any, state: Any) -> Any:
    param *= 2
    return update, state


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (nothing, "returned no \\(update, state\\) from nothing"),
        (shorter, "returned an update of shape \\(1, 3\\) from shorter"),
        (numbers, "returned an update of float from numbers"),
        (inplace, "changed update, param or state in place in inplace"),
        (halved_state, "returned state 'm' of float32 from halved_state"),
        (shrunk_state, "returned state 'm' of shape \\(1, 3\\) from shrunk_state"),
        (no_state, "returned the state \\[\\] instead of \\['m'\\] from no_state"),
        (
            further_state,
            "returned the state \\['m', 'zz'\\] instead of \\['m'\\] from further_state",
        ),
        (narrow, "returned an update of float32 from narrow"),
    ],
)
def test_what_a_stage_may_not_do_is_its_plugin_s_fault(function: Any, said: str) -> None:
    own = stage(function, state={"m": "like"}).named("")
    rule = Rule("whole", "one", (("scale", "trick", own),))
    (group,) = groups_of({"a": (rule, Member("a", (2, 3), 1.0, 1.0))})
    ops: Any = OPS
    params, state = {"a": np.ones((2, 3))}, initial_state({"0": group}, np.zeros)

    def versions(arrays: Any) -> tuple[int, ...]:
        return tuple(int(array.sum()) for array in arrays)

    with pytest.raises(PluginCodeError, match=f"plugin 'trick' {said}"):
        update(ops, {"0": group}, params, dict(params), 1.0, state, 1.0, {}, versions=versions)


def test_state_that_a_stage_does_not_declare_is_declared_or_left_out() -> None:
    own = stage(further_state, state={"m": "like"}).named("")
    (group,) = groups_of(
        {"a": (Rule("r", "one", (("scale", "trick", own),)), Member("a", (2,), 1, 1))}
    )
    ops, params, state = OPS, {"a": np.ones(2)}, initial_state({"0": group}, np.zeros)
    with pytest.raises(PluginCodeError) as raised:
        update(ops, {"0": group}, params, dict(params), 1.0, state, 1.0, {})  # type: ignore[arg-type]
    assert raised.value.fix == 'declare state={"zz": ...}, or return the state unchanged'
