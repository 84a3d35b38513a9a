"""Tests of gradient accumulation: the split into micro-batches changes neither loss nor gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")


@pytest.mark.broad(2)
@pytest.mark.parametrize(("backend", "compiled"), [("torch", "off"), ("mlx", "off"), ("mlx", "on")])
@pytest.mark.parametrize("names", [(), ("muon", "paired_heads")], ids=["plain", "both"])
def test_a_split_changes_nothing(
    lab: Any, names: tuple[str, ...], compiled: str, backend: str
) -> None:
    plan = lab.plan(*names, train_clip=0.0, train_rows=4, train_compile=compiled)
    whole = lab.batch(plan, unsupervised=5)
    _, exact = lab.exact_gradients(plan, [whole])
    expected, ours = lab.gradients(lab.trainer(plan, backend), plan, [whole])
    for parts in (2, 4):
        micro = lab.split(whole, parts)
        assert len({lab.supervised([one]) for one in micro}) == parts  # unequal numbers
        loss, found = lab.gradients(lab.trainer(plan, backend), plan, micro)
        assert loss == pytest.approx(expected, rel=1e-6)
        lab.assert_gradients(found, ours, overall=1e-6)
        lab.assert_gradients(found, exact, overall=1e-6)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_gradients_of_one_step_do_not_leak_into_the_next(lab: Any, backend: str) -> None:
    plan = lab.plan(train_clip=0.0, train_rows=4, train_lr=0.0)
    whole = lab.batch(plan, unsupervised=5)
    run = lab.trainer(plan, backend)
    steps = [lab.split(whole, parts) for parts in (2, 4, 1, 2)]
    first, *rest = lab.losses(run, plan, steps)
    norms = [run.read(run.step(s, plan.values(1.0), lab.supervised(s))).grad_norm for s in steps]
    assert rest == pytest.approx([first] * 3, rel=1e-6)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_micro_batch_without_labels(lab: Any, backend: str) -> None:
    plan = lab.plan(train_clip=0.0, train_rows=2)
    whole = lab.batch(plan, unsupervised=plan.config.train.seq_len)  # none in the second row
    _, exact = lab.exact_gradients(plan, [whole])
    _, found = lab.gradients(lab.trainer(plan, backend), plan, lab.split(whole, 2))
    lab.assert_gradients(found, exact, overall=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_and_gradients_of_a_stacked_group_are_parts_of_one_array(
    lab: Any, dtype: str
) -> None:
    plan = lab.plan("muon", train_rows=4, train_dtype=dtype)
    run, other = lab.trainer(plan, "torch"), lab.trainer(plan, "torch", seed=1)
    micro = lab.split(lab.batch(plan, unsupervised=5), 2)
    lab.losses(run, plan, [micro, micro])
    optimizer, weights = run.optimizer, run.weights
    grads = dict(zip(weights.trained, run.gradients, strict=True))
    assert optimizer.stacks
    run.resume(other.arrays())  # as a checkpoint, by parameter
    for key, names in optimizer.stacked.items():
        for name, master in zip(names, optimizer.stacks[key], strict=True):
            assert weights.masters[name].data_ptr() == master.data_ptr()
            assert torch.equal(master, other.weights.masters[name])
            assert grads[name]._base is grads[names[0]]._base is not None
            if dtype == "float32":  # parameters are masters
                assert weights.parameters[name].data_ptr() == master.data_ptr()
