"""Tests of cached arrays of a sequence, and of modules with a lookback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import EVERYTHING, Call, Layout, Linear, Module, Plugin
from minillm_core.errors import PlanError
from minillm_core.nn.decoding import KVCache
from minillm_kit import NumPyOps

OPS = NumPyOps()


def feed(cache: KVCache, columns: int) -> None:
    cache.scope({"ids": np.zeros((1, columns), np.int32)})


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    lookback=st.integers(1, 6) | st.just(EVERYTHING),
    stretch=st.integers(1, 2),
)
def test_the_past_holds_the_latest_columns(sizes: list[int], lookback: int, stretch: int) -> None:
    cache, whole = KVCache(), np.random.default_rng(0).random((1, stretch * sum(sizes), 3))
    for size in sizes:
        feed(cache, size)
        start, end = stretch * cache.columns, stretch * (cache.columns + size)
        value = whole[:, start:end]
        joined, number, nothing = cache.append(
            OPS, "node", (value, 0.5, None), lookback, stretch * size
        )
        np.testing.assert_array_equal(joined, whole[:, max(0, start - lookback) : end])
        assert (number, nothing) == (0.5, None)
        cache.commit()
    assert cache.columns == sum(sizes)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), width=st.integers(1, 4))
def test_what_has_no_columns_stays_as_it_is(sizes: list[int], width: int) -> None:
    """A table that looks like columns in one feed is recognised in the next feed of another size."""
    cache, table = KVCache(), np.ones((1, width))
    for size in sizes:
        feed(cache, size)
        (given_back,) = cache.append(OPS, "node", [table], 2, size)
        if len(set(sizes)) > 1 and size != width:
            assert given_back is table
        cache.commit()


def test_a_feed_that_was_not_committed_is_forgotten() -> None:
    cache, x = KVCache(), np.arange(6.0).reshape(1, 6, 1)
    for columns, kept in ((x[:, :2], True), (x[:, 2:5], False), (x[:, 2:3], True)):
        feed(cache, columns.shape[1])
        (joined,) = cache.append(OPS, "node", [columns], EVERYTHING, columns.shape[1])
        if kept:
            cache.commit()
    np.testing.assert_array_equal(joined, x[:, :3])


class Looking(Module):
    def __init__(self, lookback: Any = 1) -> None:
        super().__init__()
        self.lookback = lookback

    def forward(self, x: Any) -> Any:
        return x


class Outer(Module):
    """A node whose submodule has a lookback."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.lookback = own
        self.part = Looking(2)

    def forward(self, x: Any) -> Any:
        return self.part(x)


class Turned(Layout):
    lookback = 1

    def enter(self, call: Call) -> Call:
        return call


class Product(Module):
    lookback = 1

    def __init__(self) -> None:
        super().__init__()
        self.low = Linear(2, 2, role="gate")

    def forward(self, x: Any, weight: Any) -> Any:
        return x


class Both(Looking):
    """Has a lookback, and caches an array."""

    keeps = ("seen",)

    def forward(self, x: Any, seen: Any) -> Any:
        return x, x


class Core(Looking):
    def forward(self, q: Any) -> Any:
        return q


class Looks(Plugin, api=1):
    """Nodes that look back, one of each kind on demand."""

    case: str

    def build_attention(self, attn: Any) -> None:
        if self.case == "layout":
            attn.layout(Turned)
        elif self.case == "core":
            attn.core(Core)

    def build_model(self, model: Any) -> None:
        model.embed.mix(Looking)
        if self.case == "product":
            model.linear("layers.0.attention.q", Product)
        elif self.case == "part":
            model.embed.norm(Outer, own=1, name="outer")
        elif self.case == "whole":
            model.embed.norm(Outer, own=2, name="outer")
        elif self.case == "keeps":
            model.embed.norm(Both, name="both")
        elif self.case in NO_NUMBERS:
            model.embed.norm(Looking, lookback=NO_NUMBERS[self.case], name="other")


NO_NUMBERS = {"negative": -1, "fraction": 1.0, "truth": True, "word": "all"}


@pytest.mark.parametrize(
    ("case", "why", "where"),
    [
        (
            "layout",
            "Turned has lookback = 1, but receives only new columns",
            "layers.0.attention.layout",
        ),
        ("core", "Core has lookback = 1, but receives only", "layers.0.attention.core"),
        ("keeps", r"Both has keeps = \('seen',\), and looks back", "embed.it_both"),
        ("product", "Product has lookback = 1, but receives only", "layers.0.attention.q.product"),
        (
            "part",
            "Looking has lookback = 2, but the node that contains it",
            "embed.it_outer.part",
        ),
        *((case, "not a number of columns", "embed.it_other") for case in NO_NUMBERS),
    ],
)
def test_where_looking_back_would_have_no_effect_it_is_refused(
    planned: Any, case: str, why: str, where: str
) -> None:
    with pytest.raises(PlanError, match=why) as refused:
        planned(it=Looks(case=case))
    assert refused.value.where == where
    assert refused.value.fix


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("gone",), "Both.keeps names 'gone': forward does not take it"),
        (("x",), "Both.keeps names 'x': which the slot itself gives"),
    ],
)
def test_what_is_kept_is_an_argument_of_its_own(
    planned: Any, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], why: str
) -> None:
    monkeypatch.setattr(Both, "keeps", names)
    with pytest.raises(PlanError, match=why):
        planned(it=Looks(case="keeps"))


def test_a_node_looks_back_for_its_parts(planned: Any) -> None:
    assert planned(it=Looks(case="whole")).spec.embed[0].name == "it"
