"""Tests of stages that run every n-th update, on every framework, resumed and compiled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin, stage
from minillm_core.optim.update import due_at

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
CALLS: Counter[str] = Counter()


def alone(ops: Any, update: Any, param: Any, state: Any) -> Any:
    """Run only when due, and then double the gradient."""
    CALLS["alone"] += 1
    return update * 2, {"count": state["count"] + 1}


def always(ops: Any, update: Any, param: Any, state: Any, *, due: bool) -> Any:
    """Run in every update; reset the sum of gradients when due."""
    CALLS["due" if due else "not due"] += 1
    mean = update if due else state["mean"]
    return update + mean, {"count": state["count"] + (1 if due else 0.001), "mean": mean}


class Turns(Plugin, api=1):
    """Two stages before AdamW: every third update, and every second."""

    second: bool = True

    def optimizer_factory(self, optimizer):
        first = stage(alone, state={"count": "scalar"}, every=3)
        optimizer.gradient("adamw", first, name="first")
        if not self.second:
            return
        second = stage(always, state={"count": "scalar", "mean": "like"}, every=2)
        optimizer.gradient("adamw", second, name="second", after="turns_first")


def counts(run: Any) -> tuple[set[float], set[float]]:
    held: dict[str, set[float]] = {"first": set(), "second": set()}
    for name, array in run.arrays().items():
        for which, found in held.items():
            if name.startswith(f"optimizer.gradient[turns_{which}].count."):
                found.add(round(float(array.reshape(-1)[0]), 4))
    return held["first"], held["second"]


@pytest.mark.slow
def test_a_compiled_step_has_a_graph_for_a_turn_and_one_for_none(
    lab: Any, aot_trainer: Any
) -> None:
    plan = lab.plan(plugins={"turns": Turns(second=False)}, train_compile="on", model_layers=1)
    run = aot_trainer(plan)
    lab.losses(run, plan, [[lab.batch(plan, seed)] for seed in range(4)])
    assert counts(run)[0] == {2.0}
    assert sorted(run.optimizer.compiled, key=len) == [frozenset(), {3}]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "compiled"), [("torch", "off"), ("mlx", "off"), ("mlx", "on")])
def test_stages_run_in_their_turns(lab: Any, backend: str, compiled: str) -> None:
    plan = lab.plan(plugins={"turns": Turns()}, train_compile=compiled)
    steps = [[lab.batch(plan, seed)] for seed in range(8)]
    run = lab.trainer(plan, backend)
    CALLS.clear()
    lab.losses(run, plan, steps[:5])  # updates 0 to 4
    assert counts(run) == ({2.0}, {3.002})
    assert int(run.arrays()["optimizer.steps"]) == 5
    if (backend, compiled) == ("torch", "off"):
        size = len(plan.parameters)
        assert {k: v / size for k, v in CALLS.items()} == {"alone": 2, "due": 3, "not due": 2}
    saved = run.arrays()
    lab.losses(run, plan, steps[5:])
    assert counts(run) == ({3.0}, {4.004})
    again = lab.trainer(plan, backend)
    again.resume(saved)
    lab.losses(again, plan, steps[5:])
    for name, array in run.arrays().items():
        np.testing.assert_array_equal(array, again.arrays()[name], err_msg=name)
    run.restart(0)
    lab.losses(run, plan, steps[:1])
    assert counts(run) == ({1.0}, {1.0})


def test_frameworks_take_turns_alike(lab: Any) -> None:
    plan = lab.plan(plugins={"turns": Turns()})
    steps = [[lab.batch(plan, seed)] for seed in range(5)]
    ours, theirs = (lab.losses(lab.trainer(plan, one), plan, steps) for one in BACKENDS)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    plain = lab.losses(lab.trainer(lab.plan(), "torch"), lab.plan(), steps)
    assert np.abs(np.subtract(ours, plain)).max() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_share_a_turn(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"turns": Turns()}, train_accumulate=2)
    run = lab.trainer(plan, backend)
    lab.losses(run, plan, [[lab.batch(plan, 2 * n), lab.batch(plan, 2 * n + 1)] for n in range(3)])
    assert counts(run) == ({1.0}, {2.001})


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_turns_are_a_whole_number_of_updates(every: Any) -> None:
    with pytest.raises(ValueError, match=r"every=.*: a whole number of updates, 1 or more"):
        stage(alone, every=every)


def test_plans_hold_turns_where_there_are_some() -> None:
    assert stage(alone, every=3).stage.data()["every"] == 3
    assert "every" not in stage(alone).stage.data()
    assert [due_at((2, 3), step) for step in range(4)] == [{2, 3}, set(), {2}, {3}]
