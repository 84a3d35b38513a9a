"""Tests of every kernel in the emulator against NumPy float64, with its gradients, by the ops' contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import LossForm, Rotary, SigmoidCap, TanhCap
from minillm_metal import exact
from minillm_metal.emulator import emulated
from minillm_metal.kernels import attention as attention_kernels
from minillm_metal.kernels import loss as loss_kernels
from minillm_metal.kernels import norm as norm_kernels
from minillm_metal.kernels.gram import gram
from minillm_metal.kernels.norm import rms_norm
from minillm_metal.kernels.rope import rotate

pytestmark = pytest.mark.usefixtures("emulator")
slow = pytest.mark.slow

FULL = LossForm(cap=TanhCap(3.0), scale=0.5, smoothing=0.1, z=1e-2)
ASYMMETRIC = LossForm(cap=SigmoidCap(23.0, 5.0, 7.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "form", "targets", "vocab"),
    [
        (mx.float32, FULL, 2, 517),
        (mx.bfloat16, ASYMMETRIC, 1, 300),
        pytest.param(mx.float32, LossForm(), 1, 3, marks=slow),  # fewer logits than lanes
        pytest.param(mx.float32, LossForm(smoothing=0.2), 1, 129, marks=slow),
        pytest.param(mx.float16, FULL, 3, 517, marks=slow),
        pytest.param(mx.bfloat16, LossForm(z=1e-3), 1, 16_400, marks=slow),  # 512 lanes
    ],
)
def test_the_loss_is_float64s(dtype: mx.Dtype, form: LossForm, targets: int, vocab: int) -> None:
    rng, N, C = np.random.default_rng(vocab), 11, 6
    hidden, h = exact.rounded(rng, dtype, N, C)
    weight, w = exact.rounded(rng, dtype, vocab, C)
    ids = rng.integers(-2, vocab, (targets, N)).astype(np.int32)
    ids[:, 4] = -1  # a position without a target
    amounts = rng.uniform(0, 2, (targets, N)).astype(np.float32)
    given = (mx.array(ids), mx.array(amounts), form)
    product = exact.wide(hidden @ weight.T)  # rounded to the dtype, as read by the kernel
    losses, d = exact.loss_rows(product, ids, amounts, form)
    up = 0.375
    with emulated() as launches:
        total, gradients = exact.pulled(
            lambda h, w: [loss_kernels.linear_cross_entropy(h, w, *given, rows=5)[0]],
            [hidden, weight],
            mx.array(up),
        )
        _, sums, count = loss_kernels.linear_cross_entropy(hidden, weight, *given, rows=5)
        mx.eval(sums, count)
    assert len(launches) == 6  # two calls with three chunks each
    for got, want in (
        (total, (losses * amounts).sum()),
        (sums, losses.sum(1)),
        (count, (ids[0] >= 0).sum()),
        (gradients[0], up * d @ w),
        (gradients[1], up * d.T @ h),
    ):
        exact.close("linear_cross_entropy", dtype, got, np.asarray(want, np.float64))


SHAPES = {  # B, T, S, H, K, D, window, documents
    "grouped": (2, 45, 45, 4, 2, 16, 7, True),
    "windowed": (1, 70, 70, 1, 1, 64, 33, False),
    "causal": (1, 33, 33, 2, 1, 64, None, False),
    "documents": (2, 66, 66, 2, 2, 64, None, True),
    "decoding": (2, 3, 41, 2, 1, 64, 20, True),
    "one": (1, 1, 1, 1, 1, 8, None, False),
    "wide": (1, 40, 40, 2, 1, 128, 18, True),
}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("grouped", mx.float32),
        *(
            pytest.param(shape, dtype, marks=slow)
            for shape in SHAPES
            for dtype in (mx.float32, mx.bfloat16)
            if (shape, dtype) != ("grouped", mx.float32)
        ),
        pytest.param("wide", mx.float16, marks=slow),
    ],
)
def test_attention_is_float64s(shape: str, dtype: mx.Dtype) -> None:
    B, T, S, H, K, D, window, documents = SHAPES[shape]
    rng = np.random.default_rng(3)
    arrays = [exact.rounded(rng, dtype, B, *s, D) for s in ((T, H), (S, K), (S, K), (T, H))]
    ids = rng.integers(0, 3, (B, S)).astype(np.int32) if documents else None
    if ids is not None:
        ids = np.sort(ids, 1)
        ids[0] = ids[0][::-1]  # in any order
    (*given, up), (*wide, dy) = zip(*arrays, strict=True)
    with emulated() as launches:
        y, gradients = exact.pulled(
            lambda q, k, v: [
                attention_kernels.attention(
                    q, k, v, window=window, documents=None if ids is None else mx.array(ids)
                )
            ],
            given,
            up,
        )
    assert len(launches) == 3
    wanted = exact.attention(*wide, dy, window, ids)
    for got, want in zip((y, *gradients), wanted, strict=True):
        exact.close("attention", dtype, got, want)


@slow
@settings(max_examples=12)
@given(st.data())
def test_attention_of_any_shape_is_float64s(data: st.DataObject) -> None:
    """Sizes are arguments of the kernels: other shapes need no recompilation."""
    S, K, group, B = (data.draw(st.integers(1, most)) for most in (70, 2, 2, 2))
    T = data.draw(st.integers(1, S))
    window = data.draw(st.integers(1, S + 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = ((T, K * group), (S, K), (S, K), (T, K * group))
    arrays = [exact.rounded(rng, mx.float32, B, *shape, 16) for shape in shapes]
    (*given_, up), (*wide, dy) = zip(*arrays, strict=True)
    ids = rng.integers(0, 4, (B, S)).astype(np.int32)
    with emulated(orders=("shuffled",)):
        y, gradients = exact.pulled(
            lambda q, k, v: [
                attention_kernels.attention(q, k, v, window=window, documents=mx.array(ids))
            ],
            given_,
            up,
        )
    wanted = exact.attention(*wide, dy, window, ids)
    for got, want in zip((y, *gradients), wanted, strict=True):
        exact.close("attention", mx.float32, got, want)


def test_the_window_may_be_an_array_and_documents_of_any_numbers() -> None:
    """One specialisation serves every window: staged or scheduled windows need no recompilation."""
    B, T, S, H, K, D, _, _ = SHAPES["grouped"]
    rng = np.random.default_rng(5)
    (q, q64), (k, k64), (v, v64) = (
        exact.rounded(rng, mx.float32, B, *s, D) for s in ((T, H), (S, K), (S, K))
    )
    ids = np.repeat(np.array([[1_000_000], [-5]], np.int32), S, 1)
    ids[:, 20:] = 7
    for window in (1, 13, 1000):
        with emulated() as launches:
            y = attention_kernels.attention(
                q, k, v, window=mx.array(window), documents=mx.array(ids)
            )
            mx.eval(y)
        want = exact.attention(q64, k64, v64, np.zeros_like(q64), window, ids)[0]
        exact.close("attention", mx.float32, y, want)
    (done,) = launches
    assert "attention_forward" in done.launch.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (mx.float32, (2, 7)),
        pytest.param(mx.bfloat16, None, marks=slow),
        pytest.param(mx.float16, (7,), marks=slow),
    ],
)
def test_rotation_is_float64s(dtype: mx.Dtype, shape: tuple[int, ...] | None) -> None:
    rng, B, T, H, K, D = (
        np.random.default_rng(1),
        2,
        7,
        20,
        1,
        20,
    )  # more pairs than lanes, and fewer
    angles = np.outer(np.arange(12), 10.0 ** -np.arange(D // 2))
    at = None if shape is None else mx.array(rng.integers(0, 12, shape).astype(np.int32))
    turned = (mx.array(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    table = Rotary(*turned, mx.ones((D // 2,)), at)
    back = Rotary(table.cos, -table.sin, table.frequencies, at)
    arrays = [exact.rounded(rng, dtype, B, T, n, D) for n in (H, K, H, K)]
    (q, k, *up), (*wide, dq, dk) = zip(*arrays, strict=True)
    with emulated():
        outputs, gradients = mx.vjp(lambda q, k: rotate(q, k, table), [q, k], up)
        mx.eval(outputs, gradients)
    wanted = (
        exact.rotate(x, t) for t, x in ((table, wide[0]), (table, wide[1]), (back, dq), (back, dk))
    )
    for got, want in zip((*outputs, *gradients), wanted, strict=True):
        exact.close("rotate", dtype, got, want)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (mx.float32, (2, 3, 131)),  # a last lane without features
        (mx.bfloat16, (9, 1, 20)),  # threadgroups of two rows, and of three
        pytest.param(mx.float16, (1, 1, 4100), marks=slow),  # more than four features a lane
    ],
)
def test_the_norms_gradients_are_float64s(
    dtype: mx.Dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_kernels, "GROUPS", 4)
    rng, C = np.random.default_rng(2), shape[-1]
    (x, w, up), wide = zip(
        *(exact.rounded(rng, dtype, *one) for one in (shape, (C,), shape)), strict=True
    )
    wanted = exact.norm(wide[0].reshape(-1, C), wide[1], wide[2].reshape(-1, C), 1e-2)
    with emulated() as launches:
        outputs, gradients = mx.vjp(lambda x, w: rms_norm(x, w, 1e-2), [x, w], [up])
        mx.eval(outputs, gradients)
    assert len(launches) == 1
    for got, want in zip((*outputs, *gradients), wanted, strict=True):
        exact.close("rms_norm", dtype, got, want.reshape(got.shape))


def test_a_norm_without_a_weight_or_with_one_of_another_dtype() -> None:
    x, w = mx.random.normal((3, 8), mx.bfloat16), mx.random.normal((8,))
    with emulated() as launches:
        (plain,) = mx.grad(lambda x: rms_norm(x, None, 1e-5).sum())(x)[:1]
        _, of_weight = mx.grad(lambda x, w: rms_norm(x, w, 1e-5).sum(), (0, 1))(x, w)
        mx.eval(plain, of_weight)
    assert (of_weight.dtype, len(launches)) == (mx.float32, 1)


@slow
@pytest.mark.parametrize("shape", [(2, 45, 70), (1, 64, 33)])
def test_muons_orthogonalisation_is_that_of_muon(shape: tuple[int, ...]) -> None:
    """Compare product by product, also for tall matrices; symmetric results are exactly symmetric."""
    pytest.importorskip("minillm_muon")
    from minillm_core.backends.mlx.ops import MLXOps
    from minillm_muon.muon import newton_schulz

    ops, halves = MLXOps(), MLXOps({"gram": gram})
    x = exact.rounded(np.random.default_rng(2), mx.float32, *shape)[0]
    for update in (x, x.swapaxes(1, 2)):
        want = newton_schulz(ops, update, None, {}, steps=3)[0]
        with emulated():
            got = newton_schulz(halves, update, None, {}, steps=3)[0]
            square = gram(x, 2.0)
        np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-5)
    np.testing.assert_allclose(np.array(square), 2 * np.array(x @ x.swapaxes(1, 2)), atol=1e-4)
    assert np.array_equal(square, square.swapaxes(1, 2))


def test_sources_say_what_they_are_for() -> None:
    folder = Path(loss_kernels.__file__).parents[1] / "source"
    for path in folder.iterdir():
        assert path.read_text().lstrip().startswith("//"), path.name
