"""Tests of the emulator itself: Apple's own kernels, from MLX's wheel, compute the right results in it."""

from __future__ import annotations

import importlib.util
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from minillm_core import LossForm
from minillm_metal import exact
from minillm_metal.emulator import KernelFault, Launch, build, captured, run, translated

needs_compiler = pytest.mark.usefixtures("emulator")

# The limits of MLX's utils.h, which uses more of Metal than the emulator supports.
LIMITS = """
template <class T> struct Limits;
template <> struct Limits<float> {
  static constexpr float finite_min = -3.4028234663852886e38f, min = -__builtin_inff();
};
template <class T, class U> T ceildiv(T n, U m) { return (n + m - 1) / m; }
"""
DTYPES = {"float": np.float32, "half": np.float16}


def apples(header: str, kernel: str, dtype: str, reads: int, lanes: int, rows: int) -> Launch:
    """Build a launch of a kernel of the wheel, from its own source only."""
    root = Path(importlib.util.find_spec("mlx").submodule_search_locations[0])  # type: ignore
    path = root / "include/mlx/backend/metal/kernels" / f"{header}.h"
    if not path.exists():
        pytest.skip(f"this MLX has no {header}.h")
    parts = re.split(r"(?=^template <)", path.read_text(), flags=re.M)
    (mine,) = (part for part in parts if re.search(rf"\[\[kernel\]\] void {kernel}\(", part))
    others = [part for part in parts if "[[kernel]]" not in part]
    named = f'template [[host_name("k")]] [[kernel]] decltype({kernel}<{dtype}, float, {reads}>) {kernel};'
    return Launch(kernel, "".join([*others, mine, named]), (rows * lanes, 1, 1), (lanes, 1, 1))


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "V", "lanes", "limit"),
    [
        ("float", 515, 128, 2e-6),
        pytest.param("float", 4096, 1024, 2e-6, marks=pytest.mark.slow),
        pytest.param("half", 515, 32, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_apples_cross_entropy(dtype: str, V: int, lanes: int, limit: float) -> None:
    rng, rows = np.random.default_rng(0), 3
    x = (4 * rng.standard_normal((rows, V))).astype(DTYPES[dtype])
    targets, up = rng.integers(0, V, rows).astype(np.int32), rng.random(rows).astype(np.float32)
    loss, grad = np.empty(rows, np.float32), np.empty_like(x)
    size = np.array([V], np.int32)
    prefix = f"{LIMITS}\n#define CROSS_ENTROPY_N_READS 4\n"
    forward, backward = (
        apples("cross_entropy", f"cross_entropy{name}", dtype, 4, lanes, rows)
        for name in ("", "_vjp")
    )
    with pytest.raises(KernelFault, match="buffers, and is given"):
        run(forward, [x, targets], [loss], prefix=prefix)
    run(in_order(forward, 2), [x, targets, size], [loss], prefix=prefix)
    run(in_order(backward, 4), [x, targets, loss, up, size], [grad], prefix=prefix)
    wanted = exact.loss_rows(x.astype(np.float64), targets[None], up[None], LossForm())
    np.testing.assert_allclose(loss, wanted[0][0], rtol=limit)
    np.testing.assert_allclose(grad, wanted[1], atol=limit)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float", pytest.param("half", marks=pytest.mark.slow)])
def test_apples_softmax(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 250)).astype(DTYPES[dtype])
    out, size = np.empty_like(x), np.array([250], np.int32)
    launch = apples("softmax", "softmax_single_row", dtype, 4, 64, 3)
    run(in_order(launch, 1), [x, size], [out], prefix=f"{LIMITS}\n#define SOFTMAX_N_READS 4\n")
    p = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(
        out, p / p.sum(1, keepdims=True), atol=1e-6 if dtype == "float" else 1e-3
    )


def in_order(launch: Launch, output: int) -> Launch:
    """Return the kernel with its output last, as run() expects: renumbered, not moved."""
    start = launch.source.index("(", launch.source.index("[[kernel]]")) + 1
    end = launch.source.index("{", start)
    listed = re.findall(r"[^,]+?\w+ \[\[\w+\]\]|[^,]+", launch.source[start : end - 2])
    moved = listed.pop(output)
    last = max(i for i, one in enumerate(listed) if "[[" not in one)
    listed.insert(last + 1, moved)
    return launch.changed(launch.source[start : end - 2], ",".join(listed))


def small(body: str, n: int = 64) -> Launch:
    kernel: Any = mx.fast.metal_kernel(
        name="small", input_names=["x"], output_names=["y"], source=body
    )
    given = {"grid": (n, 1, 1), "threadgroup": (32, 1, 1)}
    return captured(
        lambda x: kernel(inputs=[x], output_shapes=[(n,)], output_dtypes=[mx.float32], **given),
        mx.zeros((n,)),
    )


HERE = "uint i = thread_position_in_grid.x;"


@needs_compiler
def test_a_fault_names_its_kernel_and_order_and_wrong_orders_are_refused() -> None:
    launch, x, y = small(f"{HERE} if (i > 3) y[i] = x[i];"), *np.zeros((2, 64), np.float32)
    said = (
        r"^small_float_float, order 'backward': 60 of 64 elements of y are written; y\[0\] is not$"
    )
    with pytest.raises(KernelFault, match=said):
        run(launch, [x], [y], orders=("backward",))
    with pytest.raises(ValueError, match="no order 'sideways'; orders are forward, backward, "):
        run(launch, [x], [y], orders=("sideways",))
    with pytest.raises(ValueError, match="at least one order is needed"):
        run(launch, [x], [y], orders=())
    with pytest.raises(KernelFault, match=r"its grid \(32, 0, 1\) has no threads"):
        run(replace(launch, grid=(32, 0, 1)), [x], [y])


@needs_compiler
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"{HERE} y[i / 2] = x[i];", "race: writes beside a write of y"),
        pytest.param(f"{HERE} y[i % 32] = x[i];", "race: writes", marks=pytest.mark.slow),
        pytest.param(
            f"{HERE} y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] += y[63 - i];",
            "never written|race",
            marks=pytest.mark.slow,
        ),
        pytest.param(f"{HERE} y[i] += x[i];", "reads y.*never written", marks=pytest.mark.slow),
        pytest.param(f"{HERE} y[i] = x[i - 1];", "out of bounds: byte", marks=pytest.mark.slow),
        pytest.param(
            f"{HERE} int z = int(i) << 26; y[i] = x[i] + float(z * 2);",
            "overflows a signed integer|shift",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{HERE} if (i > 3) y[i] = x[i];", "60 of 64 elements", marks=pytest.mark.slow
        ),
        pytest.param(
            f"{HERE} x[i] = 0.0f; y[i] = 1.0f;", "does not compile", marks=pytest.mark.slow
        ),
        pytest.param(f"{HERE} y[i] = missing(x[i]);", "does not compile", marks=pytest.mark.slow),
    ],
)
def test_what_a_kernel_does_wrong_is_said(body: str, said: str) -> None:
    launch = small(body)
    with pytest.raises(KernelFault, match=said):
        run(launch, [np.zeros(64, np.float32)], [np.empty(64, np.float32)])


EXCHANGE = """threadgroup float x_[32];
uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup;
x_[lane] = x[i];
simdgroup_barrier(mem_flags::%s);
y[i] = x_[31 - lane];
"""


@pytest.mark.slow
@needs_compiler
def test_lanes_of_a_simdgroup_need_a_barrier_of_theirs() -> None:
    x, y = np.arange(64, dtype=np.float32), np.empty(64, np.float32)
    run(small(EXCHANGE % "mem_threadgroup"), [x], [y])
    np.testing.assert_array_equal(y, x.reshape(2, 32)[:, ::-1].reshape(-1))
    with pytest.raises(KernelFault, match=r"race: reads beside a write of x_\[|never written"):
        run(small(EXCHANGE % "mem_none"), [x], [y])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("double z = 1.0;", "Metal has no double"),
        ("std::max(1, 2);", "no std::"),
        ("void f(float* x);", "without an address space"),
        ("void f(const float& x);", "without an address space"),
        ("atomic_fetch_add_explicit(y, 1, memory_order_relaxed);", "no atomics"),
        ("device atomic_int* a;", "no atomics"),
        ("threadgroup float a[2][3];", "does not know this threadgroup"),
    ],
)
def test_what_metal_does_not_allow_is_refused(line: str, said: str) -> None:
    with pytest.raises(KernelFault, match=f"line 2: .*{said}"):
        translated(f"// a line\n{line}\n")


@pytest.mark.parametrize(
    ("platform", "found", "version", "said"),
    [
        ("darwin", "g++", "13", "runs on Linux"),
        ("linux", None, "", "apt install"),
        ("linux", "g++", "11.4.0", "here is 11.4.0"),
        ("linux", "g++", "", "does not start"),
    ],
)
def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, platform: str, found: str | None, version: str, said: str
) -> None:
    monkeypatch.setattr(build.sys, "platform", platform)
    monkeypatch.setattr(build.shutil, "which", lambda name: found)
    answer = SimpleNamespace(stdout=version)
    monkeypatch.setattr(build.subprocess, "run", lambda *given, **more: answer)
    for one in (build.compiler, build.compiler_reason):
        one.cache_clear()
    try:
        launch = small(f"{HERE} y[i] = {time.time()};")  # never compiled before
        with pytest.raises(KernelFault, match=said):
            run(launch, [np.zeros(64, np.float32)], [np.empty(64, np.float32)])
    finally:
        for one in (build.compiler, build.compiler_reason):
            one.cache_clear()
