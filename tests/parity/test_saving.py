"""What a trainer hands out is all that it needs to go on, by names that both frameworks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
both_backends = pytest.mark.parametrize("backend", BACKENDS)
plans = pytest.mark.parametrize(
    ("names", "dtype"),
    [((), "float32"), (("muon", "paired_heads"), "float32"), (("muon",), "float16")],
    ids=["plain", "both", "float16"],
)


def steps_of(lab: Any, plan: Any, *seeds: int) -> list[list[Any]]:
    return [[lab.batch(plan, seed, unsupervised=2)] for seed in seeds]


@both_backends
@plans
def test_a_run_goes_on_to_the_bit(
    lab: Any, names: tuple[str, ...], dtype: str, backend: str
) -> None:
    plan = lab.plan(*names, train_dtype=dtype)
    run = lab.trainer(plan, backend)
    lab.losses(run, plan, steps_of(lab, plan, 0, 1, 2))
    saved = run.arrays()
    kept = {name: value.copy() for name, value in saved.items()}
    other = lab.trainer(plan, backend, seed=9)
    other.resume(saved)
    again = other.arrays()
    assert list(again) == list(saved)
    for name, value in saved.items():
        assert again[name].shape == value.shape, name
        assert again[name].tobytes() == value.tobytes(), name
    steps = steps_of(lab, plan, 3, 4, 5)
    assert lab.losses(other, plan, steps) == lab.losses(run, plan, steps)
    for name, value in run.arrays().items():
        assert other.arrays()[name].tobytes() == value.tobytes(), name
    for name, value in saved.items():  # what was handed out is nobody's buffer
        assert value.tobytes() == kept[name].tobytes(), name


@plans
def test_names_and_shapes_are_the_same_on_both(
    lab: Any, names: tuple[str, ...], dtype: str
) -> None:
    plan = lab.plan(*names, train_dtype=dtype)
    ours, theirs = (lab.trainer(plan, backend).arrays() for backend in BACKENDS)
    assert {n for n in ours if n.startswith("random.")} == {"random.torch.cpu"}
    assert {n for n in theirs if n.startswith("random.")} == {"random.mlx"}
    del ours["random.torch.cpu"], theirs["random.mlx"]
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    for name, info in plan.parameters.items():
        assert ours[f"model.{name}"].shape == info.shape
        state = {key for key in ours if key.startswith("optimizer.") and key.endswith(f".{name}")}
        assert state, name
        rule = "muon" if f"optimizer.momentum.momentum.{name}" in state else "adamw"
        first = {"muon": "momentum.momentum", "adamw": "precondition.m"}[rule]
        assert ours[f"optimizer.{first}.{name}"].shape == info.shape


def test_a_run_moves_to_the_other_framework(lab: Any) -> None:
    plan = lab.plan("muon", "paired_heads")
    first, second = (lab.trainer(plan, backend) for backend in BACKENDS)
    lab.losses(first, plan, steps_of(lab, plan, 0, 1, 2))
    second.resume(first.arrays())
    steps = steps_of(lab, plan, 3, 4, 5)
    np.testing.assert_allclose(
        lab.losses(second, plan, steps), lab.losses(first, plan, steps), atol=1e-5
    )


@both_backends
def test_weights_alone(lab: Any, backend: str) -> None:
    plan = lab.plan("muon")
    run, other = (lab.trainer(plan, backend, seed=seed) for seed in (0, 1))
    lab.losses(run, plan, steps_of(lab, plan, 0, 1))
    start = other.arrays()
    weights = {name: v for name, v in run.arrays().items() if name.startswith("model.")}
    other.load(weights)
    batch = lab.batch(plan)
    assert other.evaluate([batch]) == run.evaluate([batch])
    for name, value in other.arrays().items():
        expected = weights.get(name, start[name])
        assert value.tobytes() == expected.tobytes(), name


@both_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_does_not_fit_is_refused(lab: Any, backend: str, dtype: str) -> None:
    plan = lab.plan(train_dtype=dtype)
    run = lab.trainer(plan, backend)
    saved = run.arrays()
    name = "model.layers.1.mlp.up.weight"
    with pytest.raises(KeyError, match=name):
        run.resume({key: value for key, value in saved.items() if key != name})
    with pytest.raises(ValueError, match=name):
        run.resume(saved | {name: saved[name].T})
