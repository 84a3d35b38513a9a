"""Tests of narrow optimizer state in a trainer: stored and saved in its own dtype, resumed bitwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin, stage

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]


def momentum(ops: Any, update: Any, param: Any, state: Any) -> Any:
    mean = state["m"] * 0.9 + update
    return mean, {"m": mean}


class Narrow(Plugin, api=1):
    """AdamW's gradients go through a momentum in few bits, in stacks or one by one."""

    kind: str = "like:int8"
    needs: str = "element"

    def optimizer_factory(self, optimizer):
        draft = stage(momentum, state={"m": self.kind}, needs=self.needs)
        optimizer.gradient("adamw", draft)


@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
@pytest.mark.parametrize("needs", ["element", "matrix"])
@pytest.mark.parametrize(("kind", "dtype"), [("like:int8", "int8"), ("like:bfloat16", "int16")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_trainer_has_the_same_bits(
    lab: Any, backend: str, kind: str, dtype: str, needs: str, compiled: str
) -> None:
    if compiled == "on" and backend == "torch":
        pytest.skip("compiled by torch in the plugin's conformance tests")
    plan = lab.plan(plugins={"narrow": Narrow(kind=kind, needs=needs)}, train_compile=compiled)
    steps = [[lab.batch(plan, seed)] for seed in range(4)]
    through = lab.trainer(plan, backend)
    lab.losses(through, plan, steps[:2])
    saved = through.arrays()
    entries = {n: a for n, a in saved.items() if n.startswith("optimizer.gradient[narrow].m.")}
    codes = {
        n: a for n, a in entries.items() if not n.startswith("optimizer.gradient[narrow].m.scale")
    }
    assert {str(a.dtype) for a in codes.values()} == {dtype}
    assert {n.removeprefix("optimizer.gradient[narrow].m.") for n in codes} == {*plan.parameters}
    assert all(a.any() for a in codes.values())
    assert (len(entries) > len(codes)) == (kind == "like:int8")
    lab.losses(through, plan, steps[2:])
    resumed = lab.trainer(plan, backend)
    resumed.resume(saved)
    for name, array in resumed.arrays().items():
        np.testing.assert_array_equal(array, saved[name], err_msg=name)
    lab.losses(resumed, plan, steps[2:])
    for name, array in through.arrays().items():
        np.testing.assert_array_equal(array, resumed.arrays()[name], err_msg=name)
    through.restart(0)
    assert not any(a.any() for n, a in through.arrays().items() if "[narrow]" in n)


def test_adamw_is_not_the_fused_kernel_then(lab: Any) -> None:
    plan = lab.plan(plugins={"narrow": Narrow()})
    run = lab.trainer(plan, fused=True)
    assert not run.optimizer.fused
    assert "the rule adamw is not torch's fused kernel: narrow changed it" in run.binding.notes
