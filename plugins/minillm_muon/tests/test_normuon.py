"""Tests of NorMuon against the record's formula, matrix by matrix, and of its properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.muon import Muon, newton_schulz
from minillm_muon.normuon import NorMuon, along_the_longer, equalise, rows

OPS: Any = NumPyOps()


def record(updates: list[np.ndarray], beta2: float, axis: int) -> np.ndarray:
    """Compute the last update of ``updates`` (R, C), with the neurons' mean squares taken over ``axis``."""
    second, result = 0.0, updates[0]
    for update in updates:
        mean = (update**2).mean(axis=axis, keepdims=True)
        second = beta2 * second + (1 - beta2) * mean
        step = 1 / np.sqrt(np.maximum(second, 1e-10))
        result = update * step
        result = result * (np.linalg.norm(update) / np.linalg.norm(result))
    return result


@given(
    shape=st.sampled_from([(4, 4), (6, 3), (3, 6), (1, 5), (5, 1)]),
    seed=st.integers(0, 2**32),
    beta2=st.floats(0, 0.99),
    kind=st.sampled_from([along_the_longer, rows]),
)
def test_updates_are_the_records(
    shape: tuple[int, int], seed: int, beta2: float, kind: Any
) -> None:
    rng = np.random.default_rng(seed)
    stacks = [rng.standard_normal((2, *shape)) for _ in range(3)]
    second, got = np.zeros((2, *kind(shape))), stacks[0]
    for stack in stacks:
        got, state = equalise(OPS, stack, None, {"second": second}, beta2=beta2)
        second = state["second"]
    axis = 1 if kind is rows or shape[0] >= shape[1] else 0
    for index in range(2):
        want = record([stack[index] for stack in stacks], beta2, axis)
        np.testing.assert_allclose(got[index], want, rtol=1e-9)
        # the learning rate keeps its meaning
        assert np.linalg.norm(got[index]) == pytest.approx(np.linalg.norm(stacks[-1][index]))


def test_neurons_that_are_always_large_are_made_like_the_others() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([100.0, 1.0, 0.01])[:, None]
    second = np.zeros((1, 3, 1))
    got = np.zeros((1, 3, 2))
    for _ in range(200):
        got, state = equalise(
            OPS, sizes * rng.standard_normal((1, 3, 500)), None, {"second": second}, beta2=0.95
        )
        second = state["second"]
    np.testing.assert_allclose(
        np.linalg.norm(got[0], axis=1), np.linalg.norm(got) / 3**0.5, rtol=0.1
    )


def test_no_gradient_is_no_update() -> None:
    got, _ = equalise(OPS, np.zeros((1, 3, 4)), None, {"second": np.zeros((1, 1, 4))}, beta2=0.9)
    assert not got.any()


def test_it_comes_after_orthogonalisation_and_before_scale(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    plan = planned({"muon": Muon(momentum=0.0), "normuon": NorMuon(beta2=0.9)})
    anchors = [anchor for anchor, _, _ in plan.rules["muon"].stages]
    assert anchors[1:4] == ["orthogonalise", "precondition", "scale"]
    rng, name = np.random.default_rng(3), "layers.0.mlp.up.weight"
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    got, state = stepped(plan, params, grads, {"muon.lr": 0.02, "train.lr": 0.001})
    polar = [newton_schulz(OPS, one[name][None], None, {}, steps=5)[0][0] for one in grads]
    want, rows_, cols = params[name], *params[name].shape
    for count in range(1, 4):
        update = record(polar[:count], 0.9, axis=1)
        want = want - 0.02 * ((rows_ / cols) ** 0.5 * update + 0.1 * want)
    np.testing.assert_allclose(got[name], want, rtol=1e-9)
    kept = {s["precondition"]["second"].shape[1:] for s in state.values() if "momentum" in s}
    assert kept == {(40, 1), (1, 40), (16, 1), (1, 16)}  # one number per neuron


def test_it_needs_muon(planned: Any) -> None:
    with pytest.raises(PlanError, match="--plugins muon,normuon"):
        planned({"normuon": NorMuon()})
