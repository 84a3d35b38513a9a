"""Tests of every kernel of the core against the NumPy reference, and its gradients against torch float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.backends.candidates import MLX, TORCH
from minillm_core.ops.contract import CONTRACTS, Rotary
from minillm_core.ops.select import Candidate
from minillm_kit import reference

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

APART = ("linear_cross_entropy", "token_losses", "logits", "gram")
"""Ops with their own tests; those of the last are in the contract kit, since it has no gradient."""
WITHOUT_LOSS = [c for c in (*TORCH, *MLX) if c.op not in APART]
DTYPES = {"torch": ("float32", "bfloat16", "float16"), "mlx": ("float32",)}  # slow else
KERNELS = [
    pytest.param(c, dtype, id=f"{c.backends[0]}-{c.op}-{c.name}-{dtype}")
    for c in WITHOUT_LOSS
    for dtype in DTYPES[c.backends[0]]
    if "cpu" in c.devices
]
sizes = st.sampled_from([1, 2, 3, 5, 8, 13, 17])  # including T = 1, and non-multiples of 8


@st.composite
def arguments(draw: Any, op: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw (arguments rounded to the compute dtype, the others) of an op, by name."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, T, C = draw(st.integers(1, 2)), draw(sizes), draw(sizes)
    normal = rng.standard_normal
    if op == "linear":
        return {"x": normal((B, T, C)), "weight": normal((draw(sizes), C))}, {}
    if op == "embedding":
        V = draw(sizes)
        return {"weight": normal((V, C))}, {"ids": rng.integers(0, V, (B, T)).astype(np.int32)}
    if op == "rms_norm":
        x = {"x": normal((B, T, C))}
        if draw(st.booleans()):
            return x | {"weight": normal(C)}, {"eps": 1e-2}
        return x, {"weight": None, "eps": 1e-2}
    if op == "swiglu":
        return {"gate": normal((B, T, C)), "up": normal((B, T, C))}, {}
    K, group, D = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([2, 6, 16])),
    )
    if op == "rotate":
        floats = {"q": normal((B, T, K * group, D)), "k": normal((B, T, K, D))}
        return floats, {"table": table(rng, B, T, D, draw(st.sampled_from([None, "row", "batch"])))}
    S = T + draw(st.sampled_from([0, 0, 1, 7]))
    floats = {
        "q": normal((B, T, K * group, D)),
        "k": normal((B, S, K, D)),
        "v": normal((B, S, K, D)),
    }
    documents = np.sort(rng.integers(-1, 3, (B, S))).astype(np.int32)
    return floats, {
        "scale": draw(st.sampled_from([None, 0.1])),
        "window": draw(st.none() | st.integers(1, S + 2)),
        "documents": documents if draw(st.booleans()) else None,
    }


def table(rng: Any, B: int, T: int, D: int, positions: str | None) -> Rotary:
    frequencies = 1e4 ** (-np.arange(0, D, 2) / D)
    frequencies[len(frequencies) // 2 + 1 :] = 0.0  # half truncated
    length = T + 3
    angles = np.outer(np.arange(length), frequencies)
    shape = {None: None, "row": (T,), "batch": (B, T)}[positions]
    return Rotary(
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        frequencies.astype(np.float32),
        None if shape is None else rng.integers(0, length, shape).astype(np.int32),
    )


def oracle(op: str) -> Any:
    """Return the plain torch kernel, for float64."""
    (plain,) = (c for c in TORCH if c.op == op and c.plain)
    return plain.load()


def check(side: Any, candidate: Candidate, dtype: str, floats: dict, others: dict) -> None:
    """Compare outputs with NumPy float64, gradients with torch float64, both by the contract."""
    contract = CONTRACTS[candidate.op]
    floats = {name: side.rounded(x, dtype) for name, x in floats.items()}
    wanted = [name for name in contract.differentiable if name in floats]
    run = getattr(side, candidate.backends[0])
    got = run(candidate.load(), floats | others, wanted, dtype=dtype)
    expected = getattr(reference, candidate.op)(**floats, **others)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    tolerance = contract.tolerance[dtype]
    for index, (y, r) in enumerate(zip(got.outputs, expected, strict=True)):
        side.assert_close(y, r, tolerance, f"output {index}")
    exact = side.torch(oracle(candidate.op), floats | others, wanted, dtype="float64")
    for name in wanted:
        side.assert_close(got.grads[name], exact.grads[name], tolerance, f"gradient of {name}")


@pytest.mark.parametrize(("candidate", "dtype"), KERNELS)
@settings(max_examples=15)
@given(data=st.data())
def test_kernels_keep_their_contract(
    side: Any, candidate: Candidate, dtype: str, data: st.DataObject
) -> None:
    floats, others = data.draw(arguments(candidate.op))
    check(side, candidate, dtype, floats, others)


@pytest.mark.parametrize("op", sorted({c.op for c in WITHOUT_LOSS}))
@settings(max_examples=10)
@given(data=st.data())
def test_the_gradient_oracle_agrees_with_central_differences(
    side: Any, op: str, data: st.DataObject
) -> None:
    floats, others = data.draw(arguments(op))
    floats = {name: x if x is None else x.astype(np.float32) for name, x in floats.items()}
    wanted = [name for name in CONTRACTS[op].differentiable if name in floats]
    side.assert_slopes(
        getattr(reference, op),
        side.torch(oracle(op), floats | others, wanted, dtype="float64"),
        floats,
        others,
        wanted,
    )


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_rms_norm_of_any_size(side: Any, scale: float) -> None:
    x = {"x": (scale * np.random.default_rng(0).standard_normal((3, 8))).astype(np.float32)}
    others = {"weight": None, "eps": 1e-6}
    for candidate in (c for c in WITHOUT_LOSS if c.op == "rms_norm"):
        got = getattr(side, candidate.backends[0])(candidate.load(), x | others, ["x"])
        side.assert_close(got.outputs[0], reference.rms_norm(**x, **others), 3e-6, candidate.name)


def of_a_cpu(op: str) -> list[Any]:
    """List an op's kernels that support a CPU; FlexAttention has no backward pass there."""
    return [c for c in WITHOUT_LOSS if c.op == op and (not c.devices or "cpu" in c.devices)]


@pytest.mark.parametrize("queries", [1, 5])
def test_a_window_and_a_document_that_hold_everything_change_nothing(
    side: Any, queries: int
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 2, 4)).astype(np.float32) for n in (queries, 5, 5))
    masked = {"window": 5, "documents": np.zeros((2, 5), np.int32)}
    for candidate in of_a_cpu("attention"):
        run, kernel = getattr(side, candidate.backends[0]), candidate.load()
        plain = run(kernel, {"q": q, "k": k, "v": v}, ["q"])
        for facts in (masked, {"window": 5}, {"documents": masked["documents"]}):
            got = run(kernel, {"q": q, "k": k, "v": v, **facts}, ["q"])
            side.assert_close(got.outputs[0], plain.outputs[0], 1e-6, str(facts))


def test_attention_takes_a_window_that_is_a_value(side: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 6, 2, 4)).astype(np.float32) for _ in range(3))
    expected = reference.attention(q, k, v, window=3)
    for candidate in of_a_cpu("attention"):
        given = {"q": q, "k": k, "v": v, "window": np.array(3.0, np.float32)}
        got = getattr(side, candidate.backends[0])(candidate.load(), given, ["q"])
        side.assert_close(got.outputs[0], expected, 1e-6, candidate.name)


def test_fast_rope_equals_the_table_in_its_convention(side: Any) -> None:
    """It serves Metal; its composed form on a CPU has the same convention."""
    from minillm_core.backends.mlx.ops import rotate, rotate_fast

    rng = np.random.default_rng(0)
    floats = {"q": rng.standard_normal((2, 64, 4, 16)), "k": rng.standard_normal((2, 64, 2, 16))}
    floats = {name: x.astype(np.float32) for name, x in floats.items()}
    others = {"table": table(rng, 2, 64, 16, None)}
    expected = reference.rotate(**floats, table=others["table"])
    got = side.mlx(rotate_fast, floats | others, ["q", "k"])
    exact = side.torch(oracle("rotate"), floats | others, ["q", "k"], dtype="float64")
    for y, r in zip(got.outputs, expected, strict=True):
        side.assert_close(y, r, CONTRACTS["rotate"].tolerance["bfloat16"], "output")
    for name in ("q", "k"):
        side.assert_close(got.grads[name], exact.grads[name], 1e-5, f"gradient of {name}")
    given = floats | {"table": table(rng, 2, 64, 16, "row")}  # unsupported by it: the table serves
    ours, plain = (side.mlx(f, given, ["q"]) for f in (rotate_fast, rotate))
    for y, r in zip(ours.outputs, plain.outputs, strict=True):
        np.testing.assert_array_equal(y, r)
