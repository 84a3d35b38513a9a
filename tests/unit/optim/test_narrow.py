"""Tests of state in 8 and 16 bits: its error, its bits on every framework, its bytes, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.optim.groups import Member, groups_of
from minillm_core.optim.narrow import BLOCK, NARROW, packed, stored, unpacked
from minillm_core.optim.stage import Rule, stage
from minillm_kit import NumPyOps

OPS: Any = NumPyOps()


def drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw magnitudes over six decades, of both signs, with zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 0, shape)
    return np.where(rng.random(shape) < 0.1, 0.0, x)


def by_hand(x: np.ndarray) -> np.ndarray:
    """Encode block by block: the nearest of the 127 levels in the fourth root, never 0."""
    flat, found = x.reshape(-1), []
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        scale = np.abs(block).max()
        code = np.floor((np.abs(block) / (scale or 1.0)) ** 0.25 * 127 + 0.5)
        code = np.where(block != 0, np.maximum(code, 1), 0)
        found.append(scale * np.sign(block) * (code / 127) ** 4)
    return np.concatenate(found).reshape(x.shape)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 700))
def test_eight_bits_are_the_nearest_levels_of_each_block(seed: int, size: int) -> None:
    x = drawn(seed, (size,))
    got = unpacked(OPS, "m", NARROW[1], packed(OPS, "m", NARROW[1], x, 0), 0)
    np.testing.assert_allclose(got, by_hand(x), rtol=1e-9)
    again = unpacked(OPS, "m", NARROW[1], packed(OPS, "m", NARROW[1], got, 0), 0)
    np.testing.assert_allclose(again, got, rtol=1e-9)  # a level is preserved
    assert ((got != 0) == (x != 0)).all()


def test_the_error_is_what_is_said() -> None:
    x = np.concatenate([[1.0], np.geomspace(1e-2, 1, 255)])
    got = unpacked(OPS, "m", NARROW[1], packed(OPS, "m", NARROW[1], x, 0), 0)
    error = np.abs(got / x - 1)
    assert error.max() < 0.055
    assert error[x > 0.95].max() < 0.0165
    linear = np.round(x * 127) / 127
    assert np.abs(linear / x - 1).max() > 0.2


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("shape", [(3, 5), (4, 128), (2, 300)])
def test_a_stack_is_packed_as_its_members(kind: str, shape: tuple[int, ...]) -> None:
    x = drawn(3, (2, *shape))
    whole = packed(OPS, "m", kind, x, 1)
    for index in range(2):
        alone = packed(OPS, "m", kind, x[index], 0)
        for name, one in stored("m", kind, shape).items():
            assert whole[name][index].shape == alone[name].shape == one.shape
            np.testing.assert_array_equal(whole[name][index], alone[name])


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("compiled", [False, True])
def test_both_frameworks_have_the_same_bits(kind: str, compiled: bool) -> None:
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("mlx.core")
    from minillm_core.backends.mlx.ops import MLXOps
    from minillm_core.backends.torch.ops import TorchOps

    x = drawn(5, (3, 40, 11)).astype(np.float32)

    def both(ops: Any, array: Any) -> dict[str, Any]:
        state = packed(ops, "m", kind, array, 1)
        return {**state, "whole": unpacked(ops, "m", kind, state, 1)}

    def on_mlx(array: Any) -> dict[str, Any]:
        return both(MLXOps({}), array)

    run = mx.compile(on_mlx) if compiled else on_mlx
    theirs = {n: np.array(a.astype(mx.float32)) for n, a in run(mx.array(x)).items()}
    ours = {n: a.float().numpy() for n, a in both(TorchOps({}), torch.from_numpy(x)).items()}
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
    if kind == NARROW[1]:
        exact = packed(OPS, "m", kind, x.astype(np.float64), 1)["m"]
        assert (exact != ours["m"]).mean() < 1e-3


def linear(x: np.ndarray) -> np.ndarray:
    """Encode in eight bits with equal steps, by blocks."""
    scale = np.abs(x).max(-1, keepdims=True)
    return np.round(x / scale * 127) / 127 * scale


def fourth(x: np.ndarray) -> np.ndarray:
    return unpacked(OPS, "m", NARROW[1], packed(OPS, "m", NARROW[1], x, 0), 0)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_what_is_kept_of_second_moments_decides(beta2: float) -> None:
    """Adam's updates after 500 gradients whose magnitudes vary over some decades within a block."""
    rng = np.random.default_rng(0)
    sizes = np.exp(1.5 * rng.standard_normal((16, BLOCK)))
    kinds = {
        "float32": (lambda x: x, True),
        "root": (fourth, True),
        "itself": (fourth, False),
        "linear": (linear, True),
    }
    held = {kind: (np.zeros_like(sizes), np.zeros_like(sizes)) for kind in kinds}
    found: dict[str, np.ndarray] = {}
    for _ in range(500):
        grad = rng.standard_normal(sizes.shape) * sizes
        for kind, (keep, root) in kinds.items():
            m, v = held[kind]
            m, v = 0.9 * m + 0.1 * grad, beta2 * v + (1 - beta2) * grad**2
            found[kind] = m / (np.sqrt(v) + 1e-8)
            held[kind] = keep(m), keep(np.sqrt(v)) ** 2 if root else keep(v)
    exact = found.pop("float32")
    error = {k: np.linalg.norm(u - exact) / np.linalg.norm(exact) for k, u in found.items()}
    assert error["root"] < 0.2
    assert error["root"] < error["itself"] < error["linear"]


def kept_as_it_is(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {name: array + update for name, array in state.items()}


def test_bytes_are_counted_as_they_are_kept() -> None:
    kinds = {"a": "like", "b": NARROW[0], "c": NARROW[1]}
    own = stage(kept_as_it_is, state=kinds).named("")
    (group,) = groups_of(
        {"p": (Rule("r", "o", (("scale", "o", own),)), Member("p", (3, 100), 1, 1))}
    )
    entries = group.state_arrays()["scale"]
    assert {name: one.nbytes for name, one in entries.items()} == {
        "a": 1200, "b": 600, "c": 300, "c.scale": 8,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["like:float16", "like:uint8", "likes", "float32"])
def test_another_dtype_is_refused(kind: str) -> None:
    with pytest.raises(
        ValueError, match=f"state 'm' of '{kind}': like, scalar, like:bfloat16, like"
    ):
        stage(kept_as_it_is, state={"m": kind})
