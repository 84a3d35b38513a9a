"""Calls of every kernel with their expected results in float64: for GPUs and Macs, and the emulator on Linux."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from minillm_core import LossForm, Rotary, SigmoidCap, TanhCap
from minillm_metal import exact
from minillm_metal.kernels.attention import attention
from minillm_metal.kernels.gram import gram
from minillm_metal.kernels.loss import loss_rows
from minillm_metal.kernels.norm import gradients
from minillm_metal.kernels.rope import rotate

__all__ = ["Case", "cases"]

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class Case:
    """A call of a kernel's function; its launches return ``wanted``, one after the other.

    Attributes:
        name: for reports.
        op: the op whose tolerance applies.
        dtype: the dtype of the tolerance.
        compute: calls the kernels; returns their results, in the form of ``wanted``.
        wanted: float64.
    """

    name: str
    op: str
    dtype: str
    compute: Callable[[], list[mx.array]]
    wanted: tuple[np.ndarray, ...]


def cases(seed: int = 0) -> Iterator[Case]:
    """Build all cases: each kernel, each dtype that it supports, edges of tiles and rows."""
    rng = np.random.default_rng(seed)
    for dtype in DTYPES:
        for name, form, targets, n, vocab in (
            ("plain", LossForm(), 1, 5, 1000),
            ("all", LossForm(TanhCap(3.0), 0.5, 0.1, 1e-2), 3, 7, 517),
            ("sigmoid", LossForm(SigmoidCap(23.0, 5.0, 7.5)), 1, 3, 16_411),
        ):
            yield _loss(rng, f"loss_{name}_{dtype}", dtype, form, targets, (n, vocab))
        for name, shape, window, documents in (
            ("grouped", (2, 45, 45, 4, 2, 64), 7, True),
            ("wide", (1, 70, 70, 2, 2, 128), 33, False),
            ("causal", (1, 33, 33, 2, 1, 64), None, False),
            ("decoding", (2, 3, 41, 2, 1, 64), 20, True),
        ):
            yield _attention(rng, f"attention_{name}_{dtype}", dtype, shape, window, documents)
        for positions in (None, (7,), (2, 7)):
            yield _rotate(rng, f"rotate_{len(positions or ())}_{dtype}", dtype, positions)
        for shape in ((5, 20), (1, 131), (1030, 3)):
            yield _norm(rng, f"norm_{shape[1]}_{dtype}", dtype, shape)
    for shape in ((2, 45, 70), (1, 128, 33)):
        yield _gram(rng, f"gram_{shape[1]}", shape)


def _loss(
    rng: np.random.Generator,
    name: str,
    dtype: str,
    form: LossForm,
    targets: int,
    shape: tuple[int, int],
) -> Case:
    product, wide = exact.rounded(rng, DTYPES[dtype], *shape)
    ids = rng.integers(-2, shape[1], (targets, shape[0])).astype(np.int32)
    ids[:, 1] = -1
    weights = rng.uniform(0, 2, ids.shape).astype(np.float32)
    given = (mx.array(ids), mx.array(weights), form)
    wanted = exact.loss_rows(wide, ids, weights, form)
    return Case(name, "linear_cross_entropy", dtype, lambda: loss_rows(product, *given), wanted)


def _attention(
    rng: np.random.Generator,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    window: int | None,
    documents: bool,
) -> Case:
    B, T, S, H, K, D = shape
    arrays = [
        exact.rounded(rng, DTYPES[dtype], B, *one, D) for one in ((T, H), (S, K), (S, K), (T, H))
    ]
    (*given, up), (*wide, dy) = zip(*arrays, strict=True)
    ids = np.sort(rng.integers(0, 3, (B, S)), 1).astype(np.int32) if documents else None
    asked = {"window": window, "documents": None if ids is None else mx.array(ids)}

    def compute() -> list[mx.array]:
        y, gradients = exact.pulled(lambda q, k, v: [attention(q, k, v, **asked)], given, up)
        return [y, *gradients]

    return Case(name, "attention", dtype, compute, exact.attention(*wide, dy, window, ids))


def _rotate(
    rng: np.random.Generator, name: str, dtype: str, positions: tuple[int, ...] | None
) -> Case:
    B, T, H, K, D = 2, 7, 20, 1, 20  # more pairs than lanes, and fewer
    angles = np.outer(np.arange(12), 10.0 ** -np.arange(D // 2))
    at = None if positions is None else mx.array(rng.integers(0, 12, positions).astype(np.int32))
    turned = (mx.array(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    table = Rotary(*turned, mx.ones((D // 2,)), at)
    back = Rotary(table.cos, -table.sin, table.frequencies, at)
    arrays = [exact.rounded(rng, DTYPES[dtype], B, T, n, D) for n in (H, K, H, K)]
    (q, k, *up), wide = zip(*arrays, strict=True)

    def compute() -> list[mx.array]:
        outputs, gradients = mx.vjp(lambda q, k: rotate(q, k, table), [q, k], up)
        mx.eval(outputs, gradients)
        return [*outputs, *gradients]

    tables = (table, table, back, back)
    wanted = tuple(exact.rotate(x, one) for x, one in zip(wide, tables, strict=True))
    return Case(name, "rotate", dtype, compute, wanted)


def _norm(rng: np.random.Generator, name: str, dtype: str, shape: tuple[int, int]) -> Case:
    arrays = [exact.rounded(rng, DTYPES[dtype], *one) for one in (shape, shape[1:], shape)]
    (x, w, up), wide = zip(*arrays, strict=True)

    def compute() -> list[mx.array]:
        found = [*gradients(x, w, up, 1e-5)]
        mx.eval(found)
        return found

    return Case(name, "rms_norm", dtype, compute, exact.norm(*wide, 1e-5)[1:])


def _gram(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Case:
    x, wide = exact.rounded(rng, mx.float32, *shape)
    square = wide @ wide.swapaxes(1, 2)
    both = (2.0 * square, 0.25 * square @ square + 0.5 * square + 3.0 * np.eye(shape[1]))

    def compute() -> list[mx.array]:
        return [gram(x, 2.0), gram(mx.array(square.astype(np.float32)), 0.25, 0.5, 3.0)]

    return Case(name, "gram", "float32", compute, both)
