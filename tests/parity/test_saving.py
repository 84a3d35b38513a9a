"""Tests that a trainer's saved state suffices to continue, with names common to both frameworks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from minillm_core import Module, Plugin, State, zeros
from minillm_core.errors import BackendError, PluginCodeError

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
both_backends = pytest.mark.parametrize("backend", BACKENDS)
plans = pytest.mark.parametrize(
    ("names", "dtype"),
    [((), "float32"), (("muon", "paired_heads"), "float32"), (("muon",), "float16")],
    ids=["plain", "both", "float16"],
)


def steps_of(lab: Any, plan: Any, *seeds: int) -> list[list[Any]]:
    return [[lab.batch(plan, seed, unsupervised=2)] for seed in seeds]


class Noise(Module):
    """x (B, T, C) and noise from the framework's own generator, like a native dropout."""

    statistics = {"drawn": "sum"}  # noqa: RUF012

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.sum = State((), zeros)

    def forward(self, x: Any) -> tuple[Any, Any]:
        native = isinstance(x, torch.Tensor)
        noise = torch.rand(x.shape) if native else mx.random.uniform(shape=x.shape)
        return x + self.ops.like(0.1 * noise, x), self.ops.mean(noise)

    def next_state(self, drawn: Any) -> dict[str, Any]:
        return {"sum": self.sum + drawn}


class Careless(Noise):
    """Returns another State than declared."""

    def __init__(self, geometry: Any, what: str) -> None:
        super().__init__(geometry)
        self.what = what

    def next_state(self, drawn: Any) -> dict[str, Any]:
        total = self.sum + drawn
        wrong = {
            "bfloat16": lambda: {"sum": self.ops.astype(total, "bfloat16")},
            "shape (1,)": lambda: {"sum": self.ops.reshape(total, (1,))},
            "float": lambda: {"sum": 1.0},
            "'total'": lambda: {"total": total},
            "NoneType": lambda: None,
        }
        return wrong[self.what]()  # type: ignore[return-value]


class Spoils(Plugin, api=1):
    """Has a State that checkpoints do not support."""

    what: str = "bfloat16"

    def build_model(self, model: Any) -> None:
        model.embed.mix(Careless, what=self.what)


class Noisy(Plugin, api=1):
    """Draws on every micro-batch."""

    def build_model(self, model: Any) -> None:
        model.embed.mix(Noise)


def noisy_of(lab: Any, *names: str, **settings: Any) -> Any:
    return lab.plan(*names, plugins={"noisy": Noisy()}, train_rows=6, **settings)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.broad(3)
@both_backends
@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        *[(names, "float32") for names in ((), ("muon",), ("paired_heads",))],
        *[(("muon", "paired_heads"), dtype) for dtype in ("float32", "float16")],
    ],
    ids=["plain", "muon", "paired_heads", "both", "float16"],
)
def test_a_run_goes_on_to_the_bit_from_any_step(
    lab: Any, names: tuple[str, ...], dtype: str, backend: str
) -> None:
    plan = noisy_of(lab, *names, train_dtype=dtype)
    steps = [lab.split(lab.batch(plan, seed, unsupervised=2), 2) for seed in range(6)]
    run = lab.trainer(plan, backend)
    if dtype == "float16":  # the loss scale doubles and halves in between
        run.resume(run.arrays() | {"scaler.good": np.array(1996.0, np.float32)})
    saved, found = [run.arrays()], []
    for micro in steps:
        found += lab.losses(run, plan, [micro])
        saved.append(run.arrays())
    assert saved[-1]["optimizer.updates"] == len(steps)
    assert len({a["state.embed.noisy.sum"].tobytes() for a in saved}) == len(saved)
    if dtype == "float16":
        assert len({float(a["scaler.scale"]) for a in saved}) == 2
    other = lab.trainer(plan, backend, seed=9)
    for at in (0, 1, 4, 5):
        other.resume(saved[at])
        assert_same(other.arrays(), saved[at])
        for index in range(at, len(steps)):
            assert lab.losses(other, plan, [steps[index]]) == [found[index]]
            assert_same(other.arrays(), saved[index + 1])


@both_backends
@pytest.mark.parametrize("what", ["bfloat16", "shape (1,)", "float", "'total'", "NoneType"])
def test_a_state_that_no_checkpoint_could_hold_is_refused_at_the_first_step(
    lab: Any, what: str, backend: str
) -> None:
    plan = lab.plan(plugins={"spoils": Spoils(what=what)}, train_rows=6)
    run = lab.trainer(plan, backend)
    with pytest.raises(PluginCodeError) as refused:
        lab.losses(run, plan, steps_of(lab, plan, 0))
    assert refused.value.what.startswith("plugin 'spoils' returned ")
    assert f"{what} from next_state" in refused.value.what
    assert refused.value.where == "embed.spoils"


@both_backends
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_trainer_that_restarts_is_a_fresh_one_of_that_seed(
    lab: Any, dtype: str, backend: str
) -> None:
    plan = noisy_of(lab, "muon", train_dtype=dtype)
    steps = steps_of(lab, plan, 0, 1, 2)
    fresh = lab.trainer(plan, backend, seed=9)
    start = fresh.arrays()
    found = lab.losses(fresh, plan, steps)
    used = lab.trainer(plan, backend, seed=0)
    lab.losses(used, plan, steps[:2])
    used.restart(9)
    assert_same(used.arrays(), start)
    assert lab.losses(used, plan, steps) == found
    assert_same(used.arrays(), fresh.arrays())


@both_backends
def test_what_was_handed_out_is_nobodys_buffer(lab: Any, backend: str) -> None:
    plan = noisy_of(lab, "muon")
    run = lab.trainer(plan, backend)
    lab.losses(run, plan, steps_of(lab, plan, 0, 1))
    expected = {name: value.copy() for name, value in run.arrays().items()}
    again, snapshot = run.arrays(), run.snapshot()
    other = lab.trainer(plan, backend, seed=9)
    other.resume(again)
    lab.losses(run, plan, steps_of(lab, plan, 2, 3, 4))
    lab.losses(other, plan, steps_of(lab, plan, 2))
    assert_same(again, expected)
    assert_same(snapshot(), expected)
    assert snapshot.note is None


@both_backends
def test_another_thread_may_bring_it_while_training_goes_on(lab: Any, backend: str) -> None:
    plan = noisy_of(lab, "muon")
    run, still = (lab.trainer(plan, backend) for _ in range(2))
    start = run.arrays()
    micro = lab.split(lab.batch(plan), 2)
    expected = []
    for _ in range(12):
        lab.losses(still, plan, [micro])
        expected.append(still.arrays())
    run.resume(start)
    with ThreadPoolExecutor(3) as pool:
        brought = []
        for _ in expected:
            run.step(micro, plan.values(1 / 20), lab.supervised(micro))  # enqueued, not read
            brought.append(pool.submit(run.snapshot()))
        for one, theirs in zip(brought, expected, strict=True):
            assert_same(one.result(), theirs)


@pytest.mark.broad(2)
@both_backends
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cancelled_step_has_not_happened(lab: Any, dtype: str, backend: str) -> None:
    plan = noisy_of(lab, "muon", train_dtype=dtype)
    whole = [lab.batch(plan, seed, unsupervised=2) for seed in range(4)]
    run, other = (lab.trainer(plan, backend) for _ in range(2))
    asked = []

    def cancelled(after: int) -> Any:
        def ask() -> bool:
            asked.append(after)
            return len(asked) > after

        return ask

    def stepped(one: Any, parts: int, index: int, **more: Any) -> Any:
        micro = lab.split(whole[index], parts)
        return one.step(micro, plan.values((index + 1) / 20), lab.supervised(micro), **more)

    states = []
    start = run.arrays()
    for index, (parts, after) in enumerate([(3, 0), (2, 0), (3, 1), (6, 3)]):
        before = run.arrays()
        asked.clear()
        assert stepped(run, parts, index, cancelled=cancelled(after)) is None
        assert len(asked) == after + 1
        assert_same(run.arrays(), before)
        asked.clear()
        assert run.read(stepped(run, parts, index, cancelled=cancelled(9))).loss > 0
        assert len(asked) == parts - 1
        states.append(run.arrays())
    other.resume(start)
    for index, (parts, state) in enumerate(zip((3, 2, 3, 6), states, strict=True)):
        other.read(stepped(other, parts, index))
        assert_same(other.arrays(), state)


@both_backends
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_random_numbers_are_the_runs_own(lab: Any, compiled: str, backend: str) -> None:
    """Each step draws new numbers, a seed determines them all, and evaluation draws none of them."""
    plan = noisy_of(lab, model_layers=1, train_lr=0.0, train_compile=compiled)
    options = (
        {"compiler": partial(torch.compile, backend="aot_eager")} if backend == "torch" else {}
    )
    batch, runs = lab.batch(plan), []
    for seed, evaluates in ((0, False), (0, True), (1, False)):
        run, drawn = lab.trainer(plan, backend, seed=seed, **options), []
        for _ in range(4):
            before = float(run.arrays()["state.embed.noisy.sum"])
            run.read(run.step([batch], plan.values(1.0), lab.supervised([batch])))
            drawn.append(float(run.arrays()["state.embed.noisy.sum"]) - before)
            if evaluates:
                run.evaluate([batch])
                run.next_logits({name: field[:1] for name, field in batch.items()})
        runs.append(drawn)
    assert len(set(runs[0])) == 4
    assert runs[1] == runs[0]
    assert not set(runs[2]) & set(runs[0])


class Inside(Plugin, api=1):
    """Draws within a block."""

    def build_model(self, model: Any) -> None:
        model.norm("layers.0.mlp", Noise)


@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_what_is_recomputed_draws_the_same_or_is_refused(lab: Any, compiled: str) -> None:
    settings = {"model_layers": 1, "train_clip": 0.0, "train_compile": compiled}
    plans = [
        lab.plan(plugins={"inside": Inside()}, train_checkpointing=on, **settings)
        for on in ("false", "true")
    ]
    micro = [lab.batch(plans[0])]
    options = {"compiler": partial(torch.compile, backend="aot_eager")}
    found = [lab.gradients(lab.trainer(plan, **options), plan, micro)[1] for plan in plans]
    lab.assert_gradients(found[1], found[0], overall=1e-6)
    lab.gradients(lab.trainer(plans[0], "mlx"), plans[0], micro)
    with pytest.raises(BackendError, match="random numbers") as refused:
        lab.gradients(lab.trainer(plans[1], "mlx"), plans[1], micro)
    assert "train.checkpointing=" in str(refused.value.fix)


@both_backends
def test_random_state_may_be_anothers_or_broken(lab: Any, backend: str) -> None:
    plan = noisy_of(lab, model_layers=1)
    run = lab.trainer(plan, backend)
    saved = run.arrays()
    (name,) = (name for name in saved if name.startswith("random."))
    lab.losses(run, plan, steps_of(lab, plan, 0))
    now = run.arrays()[name]
    run.resume({n: v for n, v in saved.items() if n != name} | {"random.other": now})
    assert run.arrays()[name].tobytes() == now.tobytes() != saved[name].tobytes()
    for broken in (now[:1], now.astype(np.float32)):
        with pytest.raises(ValueError, match=name):
            run.resume(saved | {name: broken})


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
