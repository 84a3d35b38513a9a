"""Tests that a step with NaN or infinity changes nothing: the run continues as without the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Module, Plugin, State, zeros

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
FIELDS = ("stream", "term", "constant", "slope")
BAD: dict[str, tuple[str, float]] = {
    "nan": ("stream", np.nan),
    "infinite": ("stream", np.inf),
    "vast": ("term", 1e30),
    "loss": ("term", -np.inf),
    "constant": ("constant", np.nan),  # has no effect on gradients
    "slope": ("slope", 0.0),  # has no effect on the loss: sqrt's slope at 0
}
"""Fault of a batch -> the field that causes it, 1.0 elsewhere, and its value there."""


class Stream(Module):
    """x (B, T, C) times a field; counts its calls."""

    statistics = {"seen": "sum"}  # noqa: RUF012

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.count = State((), zeros)

    def forward(self, x: Any, stream: Any) -> tuple[Any, Any]:
        return x * self.ops.like(self.ops.expand_dims(stream, -1), x), self.ops.mean(stream)

    def next_state(self, seen: Any) -> dict[str, Any]:
        return {"count": self.count + seen}


class Size(Module):
    """The mean square of x, times a field."""

    def forward(self, x: Any, term: Any) -> Any:
        x = self.ops.astype(x, "float32")
        return self.ops.mean(self.ops.square(x) * self.ops.expand_dims(term, -1))


class Constant(Module):
    """A field's mean."""

    def forward(self, x: Any, constant: Any) -> Any:
        return self.ops.mean(constant)


class Slope(Module):
    """The root of the mean square of x, times a field's minimum."""

    def forward(self, x: Any, slope: Any) -> Any:
        least = -self.ops.max(-slope)
        return self.ops.sqrt(self.ops.mean(self.ops.square(self.ops.astype(x, "float32"))) * least)


class Poisoned(Plugin, api=1):
    """Reads every field that can carry a fault."""

    def build_data(self, data: Any) -> None:
        for name in FIELDS:
            data.field(name, "float32")

    def on_batch(self, batch: Any) -> Any:
        return batch

    def build_model(self, model: Any) -> None:
        model.embed.mix(Stream)

    def compute_loss(self, loss: Any) -> None:
        loss.term("size", Size, weight=0.1)
        loss.term("constant", Constant, weight=0.1)
        loss.term("slope", Slope, weight=0.1)


def micro_of(lab: Any, plan: Any, index: int, parts: int, bad: str | None = None) -> list[Any]:
    """Build a step's micro-batches, with the fault only in the last row."""
    whole = lab.batch(plan, index, unsupervised=2)
    whole |= {name: np.ones(whole["ids"].shape, np.float32) for name in FIELDS}
    if bad is not None:
        field, value = BAD[bad]
        whole[field][-1, 3] = value
    return lab.split(whole, parts)


def step(lab: Any, run: Any, plan: Any, micro: list[Any], index: int) -> Any:
    return run.read(run.step(micro, plan.values((index + 1) / 20), lab.supervised(micro)))


def kept(run: Any) -> dict[str, bytes]:
    """Return all state that a skipped step must not change."""
    apart = ("scaler.", "random.")
    return {n: v.tobytes() for n, v in run.arrays().items() if not n.startswith(apart)}


CASES = {
    "float32": ((), {}, 1),
    "float32-split": ((), {}, 2),
    "muon": (("muon",), {}, 1),
    "muon-split": (("muon", "paired_heads"), {}, 2),
    "float16": ((), {"train_dtype": "float16"}, 1),
    "float16-muon-split": (("muon",), {"train_dtype": "float16"}, 2),
    "bfloat16": (("muon",), {"train_dtype": "bfloat16"}, 1),
    "compiled": (("muon",), {"train_compile": "on", "model_layers": 1}, 1),
    "compiled-float16-split": (
        ("muon",),
        {"train_compile": "on", "train_dtype": "float16", "model_layers": 1},
        2,
    ),
}


@pytest.mark.broad(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if "compiled" in c else []) for c in CASES],
)
def test_a_run_goes_on_as_if_it_had_not_seen_the_batch(
    lab: Any, aot_trainer: Any, case: str, backend: str
) -> None:
    names, settings, parts = CASES[case]
    plan = lab.plan(*names, plugins={"poisoned": Poisoned()}, **settings)
    half = settings.get("train_dtype") == "float16"
    run, spared = (aot_trainer(plan, backend) for _ in range(2))
    for index, bad in enumerate((None, *BAD, None)):
        if bad is not None:
            before, scale = kept(run), run.arrays().get("scaler.scale")
            result = step(lab, run, plan, micro_of(lab, plan, 50 + index, parts, bad), index)
            assert result.skipped, bad
            assert result.overflow == (half and bad in ("slope", "vast")), bad
            assert np.isfinite(result.loss) == (bad not in ("nan", "infinite")), bad
            assert kept(run) == before, bad
            if half:
                after = run.arrays()
                assert after["scaler.scale"] == scale / 2, bad
                scaler = {n: v for n, v in after.items() if n.startswith("scaler.")}
                spared.resume(spared.arrays() | scaler)
        micro = micro_of(lab, plan, index, parts)
        results = [step(lab, one, plan, micro, index) for one in (run, spared)]
        assert results[0] == results[1]
        assert not results[0].skipped
        assert not results[0].overflow
        assert kept(run) == kept(spared), bad
    state = run.arrays()["state.embed.poisoned.count"]
    assert state == (2 + len(BAD)) * parts
    assert run.arrays()["optimizer.updates"] == 2 + len(BAD)


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_the_smallest_scale_the_range_is_no_excuse(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"poisoned": Poisoned()}, train_dtype="float16")
    run = lab.trainer(plan, backend)
    run.resume(run.arrays() | {"scaler.scale": np.array(2.0, np.float32)})
    found = [step(lab, run, plan, micro_of(lab, plan, 0, 1, "slope"), 0) for _ in range(3)]
    assert [result.skipped for result in found] == [True] * 3
    assert [result.overflow for result in found] == [True, False, False]
    assert run.arrays()["scaler.scale"] == 1.0
    assert run.arrays()["scaler.skipped"] == 3.0
    assert not step(lab, run, plan, micro_of(lab, plan, 0, 1), 0).skipped


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "parts"), [("float32", 1), ("float32", 2), ("float16", 1)])
def test_steps_queued_before_it_was_known_are_as_good(
    lab: Any, dtype: str, parts: int, backend: str
) -> None:
    plan = lab.plan("muon", plugins={"poisoned": Poisoned()}, train_dtype=dtype)
    ahead, prompt = (lab.trainer(plan, backend) for _ in range(2))
    bad = {1: "nan", 2: "vast", 4: "infinite"}
    steps = [micro_of(lab, plan, n, parts, bad.get(n)) for n in range(6)]

    def queue(run: Any, n: int) -> Any:
        return run.step(steps[n], plan.values((n + 1) / 20), lab.supervised(steps[n]))

    expected = [prompt.read(queue(prompt, n)) for n in range(6)]
    handles = [queue(ahead, n) for n in range(6)]
    arrays = ahead.arrays()  # requested before any result was read
    found = [ahead.read(handle) for handle in reversed(handles)]
    for result, other in zip(reversed(found), expected, strict=True):
        np.testing.assert_equal(vars(result), vars(other))  # NaN equals itself here
    assert [result.skipped for result in expected] == [n in bad for n in range(6)]
    assert arrays.keys() == prompt.arrays().keys()
    for name, array in prompt.arrays().items():
        assert arrays[name].tobytes() == array.tobytes(), name
