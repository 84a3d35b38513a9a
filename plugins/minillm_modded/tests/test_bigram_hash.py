"""Tests of hashed bigrams against the formula in Python integers, and of where the embedding is added."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.load import load
from minillm_core.nn.node import Scope
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import materialise
from minillm_modded.bigram_hash import (
    BEFORE,
    HERE,
    BigramHash,
    drawn_signs,
    hashed,
    rows_of,
    signed,
)

VOCAB = 13
PINNED = [[1, 1, -1, -1, 1], [-1, 1, 1, 1, 1], [-1, 1, 1, 1, -1]]
"""Three rows of five: checkpoints hold tables that were trained with these signs."""


def planned(plugin: BigramHash | None, layers: int = 3) -> Plan:
    sizes = {"layers": layers, "dim": 8, "heads": 2, "kv_heads": 2, "hidden": 8, "vocab": VOCAB}
    config = load(
        preset="tiny",
        assignments=[f"model.{key}={value}" for key, value in sizes.items()],
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of("bigram_hash", plugin)] if plugin else [])


def batch_of(ids: Any, plugin: BigramHash) -> dict[str, np.ndarray]:
    ids = np.asarray(ids, np.int32)
    return plugin.on_batch({"ids": ids, "labels": np.roll(ids, -1, 1)}, "train", VOCAB)


@given(
    ids=st.lists(
        st.lists(st.integers(0, 2**31 - 2), min_size=5, max_size=5), min_size=1, max_size=3
    ),
    rows=st.integers(2, 2**31 - 1),
)
def test_hashes_are_the_formula(ids: list[list[int]], rows: int) -> None:
    got = hashed(np.array(ids, np.int32), rows)
    assert got.dtype == np.int32
    for row, its in zip(got.tolist(), ids, strict=True):
        assert row[0] == rows - 1
        for before, here, value in zip(its, its[1:], row[1:], strict=False):
            assert value == ((36313 * here) ^ (27191 * before)) % (rows - 1)


@given(ids=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=5), rows=st.integers(1, 2**20))
def test_rows_of_signs_are_the_formula(ids: list[int], rows: int) -> None:
    got = signed(np.array([ids], np.int32), rows)
    assert got.dtype == np.int32
    assert got.tolist() == [[0, *((a ^ b) % rows for a, b in itertools.pairwise(ids))]]


@pytest.mark.parametrize("function", [hashed, signed])
@given(ids=st.lists(st.integers(0, 50_000), min_size=2, max_size=9), cut=st.integers(1, 8))
def test_a_continued_sequence_has_the_same_hashes(function: Any, ids: list[int], cut: int) -> None:
    """In phase decode the batch has all ids so far."""
    whole = function(np.array([ids], np.int32), 999)
    part = function(np.array([ids[:cut]], np.int32), 999)
    np.testing.assert_array_equal(part, whole[:, :cut])


def test_signs_are_a_coin_s_and_always_the_same() -> None:
    """Columns and rows are balanced, no two rows are equal; the values are the same on every machine."""
    signs = drawn_signs(500, 100)
    assert signs.dtype == np.float32
    assert set(np.unique(signs)) == {-1.0, 1.0}
    for axis, count in ((0, 500), (1, 100)):
        assert np.abs(signs.mean(axis)).max() < 5 * count**-0.5
    between = signs @ signs.T / 100 - np.eye(500)
    assert np.abs(between).max() < 0.6
    np.testing.assert_array_equal(drawn_signs(500, 100), signs)
    assert drawn_signs(3, 5).tolist() == PINNED


def test_few_pairs_of_frequent_tokens_meet() -> None:
    """Of 10,000 pairs in 5 vocabularies of 50,304, about 200 would collide by chance."""
    ids = np.array([[a, b] for a in range(100) for b in range(100)], np.int32)
    assert len(set(hashed(ids, rows_of(50_304, 5))[:, 1].tolist())) > 9_700
    assert math.gcd(HERE, BEFORE) == 1


@pytest.mark.parametrize(("size", "rows"), [(5.0, 65), (0.5, 6), (0.001, 2)])
def test_the_table_is_as_long_as_the_hash_reaches(size: float, rows: int) -> None:
    plugin = BigramHash(size=size)
    plan = planned(plugin)
    shape = plan.parameters["streams.bigram_embedding.weight"].shape
    assert shape == (rows, 8)
    field = batch_of([[1, 5, 12, 0, 3]], plugin)["bigram"]
    assert 0 <= field.min() <= field.max() < rows
    assert "bigram" in plan.fields


@pytest.mark.parametrize(("layers", "at"), [("all", [0, 1, 2]), ([0, -1], [0, 2])])
def test_it_enters_the_named_layers(layers: Any, at: list[int]) -> None:
    """Compare every block's input with the explicit sum; without attention and MLP it is also the output."""
    plugin = BigramHash(layers=layers, start=0.25)
    model = materialise(planned(plugin), 0)
    rng, batch = np.random.default_rng(1), batch_of([[3, 4, 4, 9]], plugin)
    table = model.streams["bigram_embedding"]
    table.weight = rng.standard_normal(table.weight.shape)
    looked_up = table(batch["bigram"])
    np.testing.assert_array_equal(looked_up, table.weight[batch["bigram"]])
    x = rng.standard_normal((1, 4, 8))
    for index, block in enumerate(model.layers):
        assert (block.site_in is not None) == (index in at)
        if block.site_in is not None:
            got = block.site_in(x, None, Scope({"bigram_embedding": looked_up}))
            np.testing.assert_allclose(got, x + 0.25 * looked_up, rtol=1e-12)


def test_behind_attention_it_joins_with_what_that_gives() -> None:
    """The model's first layer adds it at its input, so that an attention can read it at once."""
    model = materialise(planned(BigramHash(layers=Layers([0, 2]), behind_attention=True)), 0)
    sites = [(block.site_in is not None, block.site_mid is not None) for block in model.layers]
    assert sites == [(True, False), (False, False), (False, True)]


def test_signs_turn_the_row_and_nothing_else() -> None:
    plugin = BigramHash(signs=16)
    plan = planned(plugin)
    assert {"bigram", "bigram_sign"} <= set(plan.fields)
    assert plan.parameters.keys() == planned(BigramHash()).parameters.keys()
    batch = batch_of([[3, 4, 4, 9]], plugin)
    assert batch["bigram_sign"].tolist() == [[0, 3 ^ 4, 0, 4 ^ 9]]
    table = materialise(plan, 0).streams["bigram_embedding"]
    table.weight = np.random.default_rng(1).standard_normal(table.weight.shape)
    np.testing.assert_array_equal(
        table(batch["bigram"], batch["bigram_sign"]),
        table.weight[batch["bigram"]] * drawn_signs(16, 8)[batch["bigram_sign"]],
    )


@pytest.mark.parametrize("options", [{}, {"signs": 16}, {"behind_attention": True}])
def test_at_the_start_the_model_is_as_it_was(options: Any) -> None:
    plugin = BigramHash(**options)
    batch = batch_of([[3, 4, 4, 9], [1, 1, 2, 0]], plugin)
    values = {"normaliser": 0.125}
    ours, plain = (materialise(planned(one), 0)(dict(batch), values) for one in (plugin, None))
    assert ours.objective == plain.objective


def test_the_table_learns_at_a_rate_of_its_own() -> None:
    plan = planned(BigramHash(lr_mul=20, wd_mul=3, betas=(0.4, 0.5)))
    found = {m.name: (m, g.rule) for g in plan.groups for m in g.members}
    member, rule = found["streams.bigram_embedding.weight"]
    assert (member.lr_mul, member.wd_mul) == (20, 3)
    adam = dict(
        next(stage for anchor, _, stage in rule.stages if anchor == "precondition").arguments
    )
    assert (adam["beta1"], adam["beta2"]) == (0.4, 0.5)
    assert plan.estimate().part("bigram_hash").flops == 0
