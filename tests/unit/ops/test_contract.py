"""Tests of the contracts' data: forms, caps, and the entries of every op."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.form import Cap, LossForm, SigmoidCap, TanhCap
from minillm_kit import NumPyOps, reference
from minillm_kit.reference import NumPyArrays

caps = st.builds(TanhCap, st.floats(1, 50)) | st.builds(
    SigmoidCap, st.floats(1, 50), st.floats(-5, 5), st.floats(1, 10)
)


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_op_says_everything_of_itself(name: str) -> None:
    contract = CONTRACTS[name]
    assert contract.doc
    assert set(contract.differentiable) <= set(contract.signature.parameters)
    assert set(contract.tolerance) == {"float64", "float32", "float16", "bfloat16"}
    own = inspect.signature(getattr(reference, name))
    assert list(own.parameters) == list(contract.signature.parameters)


@given(cap=caps, z=st.floats(-30, 30))
def test_a_caps_slope_is_its_derivative(cap: Cap, z: float) -> None:
    h = 1e-5
    up, down = (cap.apply(NumPyArrays, np.float64(z + s * h)) for s in (1, -1))
    assert (up - down) / (2 * h) == pytest.approx(
        float(cap.slope(cap.apply(NumPyArrays, np.float64(z)))), abs=1e-6
    )


@given(cap=caps, z=st.lists(st.floats(-1e4, 1e4), min_size=2))
def test_caps_bound_and_keep_the_order(cap: Cap, z: list[float]) -> None:
    y = cap.apply(NumPyArrays, np.sort(np.array(z)))
    assert np.all(np.diff(y) >= 0)
    assert isinstance(cap, (TanhCap, SigmoidCap))
    low, high = (-cap.cap, cap.cap) if isinstance(cap, TanhCap) else (0.0, cap.a)
    assert np.all((y >= low) & (y <= high))


def test_a_form_knows_what_is_special_about_it() -> None:
    form = LossForm(cap=TanhCap(15.0), smoothing=0.1, z=1e-4)
    assert LossForm().empty
    assert not form.empty
    assert form.named == ("cap", "smoothing", "z")
    assert form.evaluated() == LossForm(cap=TanhCap(15.0))


def test_uniform_logits_cost_log_v() -> None:
    total, sums, count = reference.linear_cross_entropy(
        np.zeros((5, 3)), np.ones((7, 3)), np.array([[0, 6, -1, 2, 2]], np.int32)
    )
    assert count == 4
    assert total == pytest.approx(4 * np.log(7))
    np.testing.assert_allclose(sums, [total])


def test_weights_scale_the_total_and_not_the_sums() -> None:
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((5, 3)), rng.standard_normal((7, 3))
    t = rng.integers(-1, 7, (2, 5)).astype(np.int32)
    _, sums, _ = reference.linear_cross_entropy(h, w, t)
    total, weighted, _ = reference.linear_cross_entropy(h, w, t, np.array([2.0, 0.5]))
    np.testing.assert_allclose(weighted, sums)
    assert total == pytest.approx(2.0 * sums[0] + 0.5 * sums[1])


@given(T=st.integers(1, 6), extra=st.integers(0, 4), window=st.integers(1, 12))
def test_visible(T: int, extra: int, window: int) -> None:
    mask = reference.visible(T, T + extra, window)
    assert mask.shape == (T, T + extra)
    for t, row in enumerate(mask):
        i = t + extra
        assert set(np.flatnonzero(row)) == set(range(max(0, i - window + 1), i + 1))


def test_documents_do_not_see_each_other() -> None:
    documents = np.array([[0, 0, 1, -1]], np.int32)
    ((mask,),) = reference.visible(4, 4, documents=documents)
    assert mask.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


def test_kernels_of_plugins_become_ops() -> None:
    ops: Any = NumPyOps({"relu_squared": lambda x: np.maximum(x, 0) ** 2})
    assert ops.relu_squared(np.array(3.0)) == 9.0
