"""Faulty kernels, and the check that finds each: the emulator, or a comparison of values.

docs/kernels.md lists them. A fault is one change of the launched source; everything else is correct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from minillm_core import LossForm
from minillm_metal import exact
from minillm_metal.emulator import KernelFault, Launch, captured, emulated, run, sparse
from minillm_metal.kernels import attention as attention_kernels
from minillm_metal.kernels import loss as loss_kernels

pytestmark = pytest.mark.usefixtures("emulator")

FORM = LossForm(smoothing=0.1)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Fault:
    """A change of a kernel, and the expected words of the emulator's error, or "above" for a value."""

    name: str
    kernel: str
    old: str
    new: str
    said: str


FAULTS = (
    Fault(
        "missing barrier",
        "loss_rows",
        f"shared[at.simdgroup] = x;\n  {BARRIER}\n  x = simd_sum",
        "shared[at.simdgroup] = x;\n\n  x = simd_sum",
        "race|never written",
    ),
    Fault(
        "missing barrier before memory is used again",
        "loss_rows",
        f"0.0f);\n  {BARRIER}\n  return x;",
        "0.0f);\n\n  return x;",
        "race",
    ),
    Fault(
        "barrier of the wrong memory",
        "attention_forward",
        f"    {BARRIER}\n\n    float p",
        "    threadgroup_barrier(mem_flags::mem_device);\n\n    float p",
        "race",
    ),
    Fault("read past the row", "loss_rows", "c < vocab; c += step) {\n    const float x = capped<CAP>(float(product[base + c]), numbers);\n    if", "c <= vocab; c += step) {\n    const float x = capped<CAP>(float(product[base + c]), numbers);\n    if", "out of bounds"),
    Fault("wrong tail", "loss_rows", "c < vocab; c += step) {\n    const float x = capped<CAP>(float(product[base + c]), numbers);\n    float d", "c + step <= vocab; c += step) {\n    const float x = capped<CAP>(float(product[base + c]), numbers);\n    float d", "elements of gradient are written"),
    Fault("barrier that some lanes never reach", "loss_rows", "  float top = LOWEST;", "  if (lane >= vocab) return;\n  float top = LOWEST;", "divergent barrier"),
    Fault("simdgroup operation of some lanes", "loss_rows", "shared) {\n  x = simd_sum(x);", "shared) {\n  if (at.lane < 16) x = simd_sum(x);", "divergent simdgroup"),
    Fault("threadgroup array too small", "loss_rows", "threadgroup float shared[32];", "threadgroup float shared[2];", "out of bounds"),
    Fault("more than 32 KiB", "attention_forward", "threadgroup T key_tile[BLOCK * COLUMNS];", "threadgroup T key_tile[16 * BLOCK * COLUMNS];", "more than 32 KiB"),
    Fault("threadgroup memory that is not filled", "attention_forward", "if (int(index) < BLOCK) {", "if (int(index) < BLOCK - 8) {", "never written"),
    Fault("all simdgroups write", "loss_rows", "  if (lane == 0) {\n    for (int k", "  if (at.lane == 0) {\n    for (int k", "race"),
    Fault("stale output", "loss_rows", "step) gradient[base + c] = T(0.0f);", "step) {}", "elements of gradient are written"),
    Fault("32-bit offsets", "loss_rows", "size_t(row) * size_t(vocab)", "size_t(row * vocab)", "above"),
    Fault("wrong reduction", "loss_rows", "sum_of_all(sum * exp(top - highest), at, shared)", "sum_of_all(sum, at, shared)", "above"),
    Fault("window wider by one", "attention_forward", "behind < of.window", "behind <= of.window", "above"),
    Fault("wrong key-value head", "attention_forward", "size_t(head / (of.heads / of.kv_heads))", "size_t(head % of.kv_heads)", "above"),
    Fault("address space left out", "attention_forward", "inline Fragment loaded(threadgroup const T* m", "inline Fragment loaded(const T* m", "address space"),
    Fault("pointer of another address space", "attention_forward", "stage<T, BLOCK, D, COLUMNS>(key_tile, k + kv_head", "stage<T, BLOCK, D, COLUMNS>(key_tile, value_tile", "does not compile"),
    Fault("index outside a lane's array", "attention_forward", "for (int i = 0; i < BLOCK / 4; i++) {", "for (int i = 0; i <= BLOCK / 4; i++) {", "outside an array"),
    Fault("gradient of another row's sum", "attention_queries", "const float offset = there ? float(delta[number])", "const float offset = there ? float(lse[number])", "above"),
    Fault("group of heads summed by halves", "attention_keys", "for (int g = 0; g < group; g++)", "for (int g = 0; g < 1; g++)", "above"),
    Fault("sum rounded to bfloat16", "loss_rows", "    total += x;", "    total = float(T(total + x));", ""),
)  # fmt: skip

UNSEEN = ("sum rounded to bfloat16",)
"""Faults within the tolerance of their dtype, which no comparison of values can find."""


def loss(change: Callable[[Launch], Launch]) -> None:
    rng, n, V = np.random.default_rng(0), 5, 100  # 128 lanes
    product, wide = exact.rounded(rng, mx.bfloat16, n, V)
    ids = rng.integers(0, V, (1, n)).astype(np.int32)
    ids[0, 2] = -1
    weights = rng.uniform(0, 2, (1, n)).astype(np.float32)
    with emulated(change=change):
        found = loss_kernels.loss_rows(product, mx.array(ids), mx.array(weights), FORM)
    for got, want in zip(found, exact.loss_rows(wide, ids, weights, FORM), strict=True):
        exact.close("linear_cross_entropy", mx.bfloat16, got, want)


def attention(change: Callable[[Launch], Launch]) -> None:
    rng, T, H, K, D, window = np.random.default_rng(0), 45, 4, 2, 16, 7
    shapes = ((T, H), (T, K), (T, K), (T, H))
    arrays = [exact.rounded(rng, mx.float32, 1, *shape, D) for shape in shapes]
    (*given, up), (*wide, dy) = zip(*arrays, strict=True)
    with emulated(change=change):
        y, gradients = exact.pulled(
            lambda q, k, v: [attention_kernels.attention(q, k, v, window=window)], given, up
        )
    for got, want in zip((y, *gradients), exact.attention(*wide, dy, window, None), strict=True):
        exact.close("attention", mx.float32, got, want)


def far(change: Callable[[Launch], Launch]) -> None:
    """Compute the last row of logits at offsets beyond 2^32; memory is allocated where touched."""
    n, V = 70_000, 65_536
    shapes = ((n, V), (1, n), (1, n))
    dtypes = ((mx.float32, np.float32), (mx.int32, np.int32), (mx.float32, np.float32))
    launch = captured(
        lambda *xs: loss_kernels.loss_rows(*xs, LossForm()),
        *(mx.zeros(shape, dtype) for shape, (dtype, _) in zip(shapes, dtypes, strict=True)),
    )
    product, targets, weights = (sparse(s, d) for s, (_, d) in zip(shapes, dtypes, strict=True))
    product[-1] = np.random.default_rng(0).standard_normal(V)
    targets[0, -1], weights[0, -1] = 11, 2.0
    sizes, numbers = np.array([n, V], np.int32), np.array([1, 0, 0, 0, 0, 0], np.float32)
    outputs = [sparse(shapes[1], np.float32), sparse(shapes[0], np.float32)]
    given = [product, targets, weights, sizes, numbers]
    run(change(launch), given, outputs, orders=("forward",), threadgroups=[n - 1], filled=[1, V])
    wanted = exact.loss_rows(
        product[-1:].astype(np.float64), targets[:, -1:], weights[:, -1:], LossForm()
    )
    for got, want in zip((outputs[0][:, -1:], outputs[1][-1:]), wanted, strict=True):
        exact.close("linear_cross_entropy", mx.float32, mx.array(got), want)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault in FAULTS[:1] else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    planted = []

    def change(launch: Launch) -> Launch:
        if fault.kernel not in launch.name:
            return launch
        planted.append(launch)
        return launch.changed(fault.old, fault.new)

    case = attention if fault.kernel != "loss_rows" else far if "32-bit" in fault.name else loss
    if fault.name in UNSEEN:
        case(change)
    else:
        with pytest.raises((KernelFault, AssertionError), match=fault.said):
            case(change)
    assert planted


@pytest.mark.slow
def test_without_a_fault_nothing_is_caught() -> None:
    loss(lambda launch: launch)
    attention(lambda launch: launch)
    far(lambda launch: launch)
