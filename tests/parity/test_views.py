"""Tests of views, which replace parameters in evaluation, on both frameworks; training does not depend on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin, PluginCodeError, option, stage

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])


class Traced(Plugin, api=1):
    """Keeps the sum of all written values; evaluates its average with the parameter."""

    share: float = option(0.5, help="of the sum")
    of: str = option("", help="the beginning of the roles that it is for")

    def optimizer_factory(self, optimizer):
        optimizer.extend("*", "average", stage(added, state={"sum": "like"}))
        optimizer.view(lambda _, p: p.role.startswith(self.of), weighed, share=self.share)


def added(ops, update, param, state):
    """Add the new parameter to the sum."""
    return update, {"sum": state["sum"] + param}


def weighed(ops, param, state, *, share):
    """Average the sum and the parameter."""
    return param + share * (state["average.sum"] - param)


class Signed(Plugin, api=1):
    """Evaluates tables by the sign of their momentum."""

    def optimizer_factory(self, optimizer):
        optimizer.view(lambda _, p: bool(p.rows), signed)


def signed(ops, param, state):
    """Add one where the momentum is above 0."""
    assert sorted(state) == ["precondition.m", "precondition.v"]
    return ops.where(state["precondition.m"] > 0, param + 1.0, param)


class Broken(Plugin, api=1):
    """Returns an invalid view."""

    how: str = option("shape", help="shape, dtype, nothing or place")

    def optimizer_factory(self, optimizer):
        optimizer.view(lambda _, p: p.role == "head", broken, how=self.how)


def broken(ops, param, state, *, how):
    """Break the contract."""
    if how == "place":
        param += 1.0
    made = {"shape": param[:1], "dtype": ops.astype(param, "bfloat16"), "nothing": None}
    return made.get(how, param)


def steps_of(lab: Any, plan: Any, count: int) -> list[list[Any]]:
    """Build batches for a plan of installed plugins."""
    return [[lab.completed(plan, lab.batch(plan, seed))] for seed in range(count)]


def seen(arrays: Any) -> dict[str, np.ndarray]:
    return {k.removeprefix("view."): a for k, a in arrays.items() if k.startswith("view.")}


@pytest.mark.parametrize(
    ("backend", "names", "settings"),
    [
        ("torch", (), {"model_tied": True}),
        ("torch", ("muon",), {"train_dtype": "bfloat16"}),
        ("torch", ("lion",), {}),
        ("mlx", ("muon",), {"model_tied": True}),
        ("mlx", (), {"train_dtype": "bfloat16"}),
        pytest.param(
            *("torch", ("muon",), {"train_compile": "on", "model_layers": 1}),
            marks=pytest.mark.slow,
        ),
        pytest.param("mlx", ("muon",), {"train_compile": "on"}, marks=pytest.mark.slow),
        pytest.param("torch", ("muon",), {"train_dtype": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_the_view_is_evaluated_and_training_goes_on_from_the_parameters(
    lab: Any, aot_trainer: Any, backend: str, names: tuple[str, ...], settings: dict[str, Any]
) -> None:
    plain = lab.plan(*names, **settings)
    plan = lab.plan(*names, plugins={"traced": Traced(of="")}, **settings)
    batches = steps_of(lab, plain, 6)
    alone, run = (aot_trainer(one, backend) for one in (plain, plan))
    probe = batches[0]
    row = {name: part[:1] for name, part in probe[0].items()}
    expected = lab.losses(alone, plain, batches)
    found: list[float] = []
    for index, micro in enumerate(batches):
        values = plan.values((index + 1) / plan.config.train.steps)
        run.evaluate(probe)
        run.next_logits(row)
        # swapped arrays must not be inputs that a graph is compiled for
        with torch.compiler.set_stance("fail_on_recompile" if index > 1 else "default"):
            found.append(run.read(run.step(micro, values, lab.supervised(micro))).loss)
    assert found == expected  # bitwise equal to a run without evaluation or storing
    bare, arrays = alone.arrays(), run.arrays()
    for name, array in bare.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    views = seen(arrays)
    assert views.keys() == plan.parameters.keys()
    for name, view in views.items():
        total = arrays[f"optimizer.average.sum.{name}"]
        exact = arrays[f"model.{name}"] + 0.5 * (total - arrays[f"model.{name}"])
        np.testing.assert_allclose(view, exact, rtol=1e-6, atol=1e-7)
        assert not np.array_equal(view, arrays[f"model.{name}"])
    other = aot_trainer(plain, backend, seed=1)
    other.load(arrays | {f"model.{name}": view for name, view in views.items()})
    assert run.evaluate(probe) == other.evaluate(probe)
    np.testing.assert_array_equal(run.next_logits(row), other.next_logits(row))
    assert run.evaluate(probe)[0] != alone.evaluate(probe)[0]
    shown = run.witnesses()
    assert all(shown[f"view:{name}"] for name in plan.parameters)
    assert shown["stage:adamw.average" if "lion" not in names else "stage:lion.average"]


@BACKENDS
def test_a_resumed_run_has_the_bits_of_one_that_was_never_saved(lab: Any, backend: str) -> None:
    plan = lab.plan("muon", plugins={"traced": Traced()}, train_dtype="bfloat16")
    batches = steps_of(lab, lab.plan(), 4)
    straight, first, second = (lab.trainer(plan, backend, seed=s) for s in (0, 0, 1))
    lab.losses(straight, plan, batches)
    lab.losses(first, plan, batches[:2])
    second.resume(first.arrays())
    assert second.evaluate(batches[0]) == first.evaluate(batches[0])
    for run in (first, second):
        for index in (2, 3):
            values = plan.values((index + 1) / plan.config.train.steps)
            run.read(run.step(batches[index], values, lab.supervised(batches[index])))
    wanted = straight.arrays()
    for run in (first, second):
        got = run.arrays()
        assert all(np.array_equal(got[k], wanted[k]) for k in wanted if "random" not in k)
    straight.restart(0)
    fresh = lab.trainer(plan, backend).arrays()
    again = straight.arrays()
    assert all(np.array_equal(again[k], fresh[k]) for k in fresh if "random" not in k)


def test_adamw_stays_torch_s_fused_kernel_with_a_stage_behind_it(lab: Any) -> None:
    plan = lab.plan(plugins={"traced": Traced()})
    fused, staged = (lab.trainer(plan, "torch", fused=one) for one in (True, False))
    assert "the rule adamw is torch's fused kernel" in fused.binding.notes
    assert fused.optimizer.fused
    assert not fused.optimizer.staged
    batches = steps_of(lab, lab.plan(), 4)
    for run in (fused, staged):
        lab.losses(run, plan, batches)
    ours, theirs = fused.arrays(), staged.arrays()
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
    counts = fused.witnesses()
    assert counts["stage:adamw.average"] == 4 * len(plan.parameters) == counts["stage:adamw.write"]


@BACKENDS
def test_a_step_that_is_left_out_is_not_averaged(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"traced": Traced()})
    run, (micro,) = lab.trainer(plan, backend), steps_of(lab, lab.plan(), 1)
    before = run.arrays()
    values = {name: float("nan") for name in plan.values(0.5)}
    bad = before | {"model.head.weight": before["model.head.weight"] * np.float32("nan")}
    run.resume(bad)
    assert run.read(run.step(micro, values, lab.supervised(micro))).skipped
    after = run.arrays()
    for name in plan.parameters:
        assert not after[f"optimizer.average.sum.{name}"].any()


@BACKENDS
def test_a_table_of_rows_is_up_to_date_before_its_view(lab: Any, backend: str) -> None:
    names = ("bigram_hash", "sparse_rows")
    plan = lab.plan(*names, plugins={"signed": Signed()})
    (table,) = plan.views
    assert {table} == {*plan.by_rows}
    run, plain = lab.trainer(plan, backend), lab.trainer(lab.plan(*names), backend)
    batches = steps_of(lab, lab.plan(*names), 5)
    for one in (run, plain):
        lab.losses(one, plan, batches)
    arrays, bare = run.arrays(), plain.arrays()
    np.testing.assert_array_equal(arrays[f"model.{table}"], bare[f"model.{table}"])
    (view,) = seen(arrays).values()
    ahead = arrays[f"optimizer.rows.precondition.m.{table}"] > 0  # a moment's sign does not decay
    assert 0 < ahead.sum() < ahead.size
    np.testing.assert_array_equal(view, arrays[f"model.{table}"] + ahead)
    other = lab.trainer(lab.plan("bigram_hash"), backend)
    other.load(arrays | {f"model.{table}": view})
    assert run.evaluate(batches[0])[0] == pytest.approx(other.evaluate(batches[0])[0], rel=1e-6)
    lab.losses(run, plan, batches[:1])
    lab.losses(plain, plan, batches[:1])
    later, bare = run.arrays(), plain.arrays()
    assert all(np.array_equal(later[name], array) for name, array in bare.items())


@BACKENDS
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", r"returned float32 \(1, 32\) from"),
        ("dtype", "returned bfloat16 "),
        ("nothing", "returned NoneType "),
        ("place", "changed param or state in place in"),
    ],
)
def test_a_view_that_is_none_is_the_plugin_s_before_the_first_step(
    lab: Any, backend: str, how: str, said: str
) -> None:
    if (backend, how) == ("mlx", "place"):
        pytest.skip("MLX's arrays are never written in place")
    plan = lab.plan(plugins={"broken": Broken(how=how)})
    with pytest.raises(PluginCodeError, match=said) as caught:
        lab.trainer(plan, backend)
    assert "'broken'" in str(caught.value)
    assert caught.value.where == "opt.view[head.weight]"
