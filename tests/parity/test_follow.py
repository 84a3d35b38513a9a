"""Tests of a parameter that equals another for a fraction of the run: a tied model, then two parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Normal, Plugin, option

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

HEAD, EMBEDDING = "head.weight", "embedding.weight"
STEPS, PARTED = 10, 6


class Follow(Plugin, api=1):
    """The head is the embedding for a while."""

    until: float = option(0.6, help="share of the run")
    leads: str = option("embedding", help="which of the two")
    factors: bool = option(False, help="whether both have factors of their own")

    def build_model(self, model):
        model.init(f"{self.leads}.weight", Normal(0.02))

    def optimizer_factory(self, optimizer):
        pair = (HEAD, EMBEDDING) if self.leads == "embedding" else (EMBEDDING, HEAD)
        optimizer.follow(*pair, until=self.until)
        if self.factors:
            optimizer.set(lambda name, _: name == HEAD, lr_mul=0.5, wd_mul=2.0)
            optimizer.set(lambda name, _: name == EMBEDDING, lr_mul=3.0, wd_mul=0.25)


class Small(Plugin, api=1):
    """The embedding begins as a tied one does, with the factors that the pair has."""

    parted: bool = option(False, help="factors of the two apart")
    factors: bool = option(False, help="any")

    def build_model(self, model):
        model.init("embedding.weight", Normal(0.02))

    def optimizer_factory(self, optimizer):
        if self.factors:
            optimizer.set(lambda name, _: name == EMBEDDING, lr_mul=3.0, wd_mul=0.25)
        if self.factors and self.parted:
            optimizer.set(lambda name, _: name == HEAD, lr_mul=0.5, wd_mul=2.0)


def trained(lab: Any, run: Any, plan: Any, batches: list[Any], first: int = 0) -> list[Any]:
    found = []
    for index, micro in enumerate(batches, first):
        values = plan.values((index + 1) / STEPS)
        found.append(run.read(run.step(micro, values, lab.supervised(micro))))
    return found


def doubled(arrays: Any) -> dict[str, np.ndarray]:
    """Return a tied run's arrays, with a head that has the embedding's weights and moments."""
    own = {k: a for k, a in arrays.items() if k.endswith(f".{EMBEDDING}")}
    return {**arrays, **{k.replace(EMBEDDING, HEAD): a for k, a in own.items()}}


@pytest.mark.parametrize(
    ("backend", "names", "factors", "settings"),
    [
        ("torch", (), False, {}),
        ("torch", ("lion",), True, {"train_accumulate": 2}),
        ("torch", ("muon", "agc"), True, {"train_dtype": "bfloat16"}),
        ("mlx", (), False, {"train_accumulate": 2}),
        ("mlx", ("muon",), True, {"train_dtype": "bfloat16"}),
        pytest.param("torch", (), True, {"train_compile": "on"}, marks=pytest.mark.slow),
        pytest.param("mlx", (), True, {"train_compile": "on"}, marks=pytest.mark.slow),
        pytest.param("torch", (), False, {"train_dtype": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_they_are_a_tied_matrix_and_then_two(
    lab: Any,
    aot_trainer: Any,
    backend: str,
    names: tuple[str, ...],
    factors: bool,
    settings: dict[str, Any],
) -> None:
    settings = {"train_clip": 0.05, "train_steps": STEPS, **settings}
    plan = lab.plan(*names, plugins={"follow": Follow(factors=factors)}, **settings)
    small = Small(factors=factors)
    tied = lab.plan(*names, plugins={"small": small}, model_tied=True, **settings)
    parted = Small(factors=factors, parted=True)
    apart = lab.plan(*names, plugins={"small": parted}, **settings)
    count = settings.get("train_accumulate", 1)
    batches = [[lab.batch(plan, seed * 7 + i) for i in range(count)] for seed in range(STEPS)]
    run, one, two = (aot_trainer(p, backend) for p in (plan, tied, apart))
    dtype, compiled = settings.get("train_dtype", "float32"), "train_compile" in settings
    # after the separation, graphs are equal; compiled, they round differently
    same = {"rtol": 0, "atol": 0} if not compiled else {"rtol": 2e-4, "atol": 2e-5}
    # gradients are added in another order: of micro-batches, for MLX's norm, in bfloat16 by autograd
    plain = (backend, count, dtype, compiled) == ("torch", 1, "float32", False)
    tolerance = same if plain else {"rtol": 2e-4, "atol": 2e-5}
    tolerance = tolerance if dtype == "float32" else {"rtol": 2e-2, "atol": 1e-2}
    begun, start = run.arrays(), one.arrays()
    np.testing.assert_array_equal(begun[f"model.{HEAD}"], start[f"model.{EMBEDDING}"])
    ours = trained(lab, run, plan, batches[:PARTED])
    theirs = trained(lab, one, tied, batches[:PARTED])
    for field in ("loss", "grad_norm"):
        got, expected = ([getattr(r, field) for r in side] for side in (ours, theirs))
        np.testing.assert_allclose(got, expected, **tolerance)
    together = run.arrays()
    for name in [n for n in together if n.endswith(f".{HEAD}")]:  # weights and moments, bitwise
        leader = together[name.replace(HEAD, EMBEDDING)]
        np.testing.assert_array_equal(together[name], leader, err_msg=name)
        assert np.any(leader)
    expected = doubled(one.arrays())
    assert expected.keys() == together.keys()
    for name in [n for n in expected if not n.startswith("random.")]:
        np.testing.assert_allclose(together[name], expected[name], err_msg=name, **tolerance)
    two.resume(together)
    ours = trained(lab, run, plan, batches[PARTED:], PARTED)
    theirs = trained(lab, two, apart, batches[PARTED:], PARTED)
    np.testing.assert_allclose([r.loss for r in ours], [r.loss for r in theirs], **same)
    parts, expected = run.arrays(), two.arrays()
    for name in [n for n in expected if not n.startswith("random.")]:
        np.testing.assert_allclose(parts[name], expected[name], err_msg=name, **same)
    assert not np.allclose(parts[f"model.{HEAD}"], parts[f"model.{EMBEDDING}"], atol=1e-4)
    assert run.witnesses()[f"follow:{HEAD}"]


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_run_resumed_on_either_side_has_the_bits_of_one_that_was_not(
    lab: Any, backend: str
) -> None:
    plan = lab.plan("muon", plugins={"follow": Follow(leads="head")}, train_steps=STEPS)
    batches = [[lab.batch(plan, seed)] for seed in range(STEPS)]
    straight = lab.trainer(plan, backend)
    trained(lab, straight, plan, batches)
    wanted = straight.arrays()
    for at in (3, PARTED, 8):
        first, second = (lab.trainer(plan, backend, seed=seed) for seed in (0, 1))
        trained(lab, first, plan, batches[:at])
        second.resume(first.arrays())
        trained(lab, second, plan, batches[at:], at)
        got = second.arrays()
        assert all(np.array_equal(got[k], wanted[k]) for k in wanted if "random" not in k)
