"""Tests of paired heads against the record's text, position by position in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.config.load import load
from minillm_core.nn.attention import AttentionSpec, Call
from minillm_core.nn.module import materialising
from minillm_core.nn.node import Scope
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import NumPyFramework, materialise
from minillm_modded.paired_heads import Interleave, PairedHeads

DIM = 16


def planned(heads: int, kv_heads: int, plugin: PairedHeads | None = None, layers: int = 1) -> Plan:
    settings_ = {
        "layers": layers,
        "dim": DIM,
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": 8,
        "vocab": 16,
    }
    config = load(
        preset="tiny",
        assignments=[f"model.{key}={value}" for key, value in settings_.items()],
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of("paired_heads", plugin or PairedHeads())])


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    half = len(x) // 2
    angle = position * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    )


def definition(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attend q (T, H, D), k and v (T, K, D) -> (T, H, D), one query and one key at a time."""
    length, heads, size = q.shape
    kv_heads = k.shape[1]
    y = np.zeros_like(q)
    for t in range(length):
        for head in range(heads):
            pair, parity = divmod(head, 2)
            kv_pair = pair // (heads // kv_heads)
            here = 2 * t + parity
            query = rotated(q[t, head], here)
            seen = range(here + 1)  # at 2t + 1 including the first head's key of the same token
            scores = [
                query @ rotated(k[s // 2, 2 * kv_pair + s % 2], s) / np.sqrt(size) for s in seen
            ]
            weights = np.exp(scores - np.max(scores))
            values = np.stack([v[s // 2, 2 * kv_pair + s % 2] for s in seen])
            y[t, head] = weights @ values / weights.sum()
    return y


@settings(max_examples=15)
@given(
    shape=st.sampled_from([(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)]),
    length=st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
def test_attention_is_the_records(shape: tuple[int, int], length: int, seed: int) -> None:
    heads, kv_heads = shape
    rng = np.random.default_rng(seed)
    model = materialise(planned(heads, kv_heads), 0)
    layer = model.layers[0].attention
    for leaf in (layer.q, layer.k, layer.v):
        leaf.weight = rng.standard_normal(leaf.weight.shape)
    layer.o.weight = np.eye(DIM)
    x = rng.standard_normal((2, length, DIM))
    got = layer(x, Scope({}))
    for row in range(2):
        q, k, v = (
            (x[row] @ leaf.weight.T).reshape(length, -1, DIM // heads)
            for leaf in (layer.q, layer.k, layer.v)
        )
        np.testing.assert_allclose(
            # the core's tables are float32
            got[row],
            definition(q, k, v).reshape(length, DIM),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.fixture(scope="module")
def layout() -> Any:
    with materialising(NumPyFramework()):
        return Interleave()


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_entering_loses_nothing(layout: Any, rows: int, length: int, pairs: int, kv: int) -> None:
    q = np.arange(rows * length * 2 * pairs * 3).reshape(rows, length, 2 * pairs, 3)
    k = np.arange(rows * length * 2 * kv * 3).reshape(rows, length, 2 * kv, 3)
    call = layout.enter(Call(q, k, -k))
    assert call.q.shape == (rows, 2 * length, pairs, 3)
    assert call.k.shape == (rows, 2 * length, kv, 3)
    np.testing.assert_array_equal(call.v, -call.k)
    np.testing.assert_array_equal(layout.leave(call.q), q)
    for t in range(length):
        for head in range(2 * pairs):
            np.testing.assert_array_equal(call.q[:, 2 * t + head % 2, head // 2], q[:, t, head])


@pytest.mark.parametrize("positions", [[0, 1, 2], [[0, 1, 2], [5, 0, 1]]])
def test_each_head_has_a_position_of_its_own(layout: Any, positions: list[Any]) -> None:
    q = np.zeros((2, 3, 2, 4))
    given_ = np.array(positions, np.int32)
    documents = np.array([[0, 0, 1], [2, 2, 2]], np.int32)
    call = layout.enter(Call(q, q, q, positions=given_, documents=documents))
    np.testing.assert_array_equal(call.positions[..., 0::2], 2 * given_)
    np.testing.assert_array_equal(call.positions[..., 1::2], 2 * given_ + 1)
    np.testing.assert_array_equal(call.documents, np.repeat(documents, 2, axis=1))


def test_window_and_scale_are_left_alone(layout: Any) -> None:
    q = np.zeros((1, 2, 2, 4))
    call = layout.enter(Call(q, q, q, window=5, scale=0.5))
    assert (call.window, call.scale, call.positions, call.documents) == (5, 0.5, None, None)


@pytest.mark.parametrize(
    ("layers", "paired"), [("all", {0, 1, 2, 3}), ([0, -1], {0, 3}), ("every:2", {0, 2})]
)
def test_the_layers_are_those_that_are_named(layers: Any, paired: set[int]) -> None:
    plan = planned(4, 2, PairedHeads(layers=layers), layers=4)
    specs = [block.attention for block in plan.spec.blocks]
    assert {
        i for i, spec in enumerate(specs) if isinstance(spec, AttentionSpec) and spec.layout
    } == paired


def test_it_adds_no_parameter_and_stands_in_the_way_of_export() -> None:
    plan = planned(4, 2)
    assert {info.owner for info in plan.parameters.values()} == {"core"}
    assert plan.export.blocked_by == ("paired_heads",)
