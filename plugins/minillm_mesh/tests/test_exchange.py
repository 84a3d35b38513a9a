"""All-gather of keys or all-to-all of heads: the choice by bytes, and refusals with their reasons."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_mesh.exchange import HEADS, KEYS, chosen, numbers


def plan_of(plugins: str = "", **settings: Any) -> minillm.Plan:
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    given |= {"model.dim": 64, "model.hidden": 64}
    return minillm.build_plan(minillm.load(preset="tiny", plugins=plugins, settings=given))


@given(kv_heads=st.integers(1, 8), each=st.integers(1, 8), size=st.integers(2, 16))
def test_numbers_are_those_of_the_arrays(kv_heads: int, each: int, size: int) -> None:
    """A rank gathers keys and values of all S columns, or exchanges q, k, v and y of its S / N columns."""
    heads, columns = kv_heads * each, 2 * size
    gathered = 2 * kv_heads * columns
    exchanged = (heads + 2 * kv_heads) * columns // size + heads * columns // size
    assert numbers(KEYS, heads, kv_heads, size) * columns == gathered
    assert numbers(HEADS, heads, kv_heads, size) * columns == pytest.approx(exchanged)
    assert (exchanged < gathered) == (each + 1 < size)


def test_auto_takes_what_sends_fewer_bytes() -> None:
    both: dict[str, Any] = {"model_heads": 8, "model_kv_heads": 8}
    assert chosen(plan_of(**both), 2).way == KEYS  # as many bytes either way
    assert chosen(plan_of(**both), 4).way == HEADS
    assert chosen(plan_of(**both, mesh_context_exchange="keys"), 4).way == KEYS
    assert chosen(plan_of(**both, mesh_context_exchange="heads"), 2).way == HEADS
    assert chosen(plan_of(model_heads=8, model_kv_heads=2), 2).way == KEYS
    assert not chosen(plan_of(**both), 2).note


@pytest.mark.parametrize(
    ("plugins", "settings", "why"),
    [
        (
            "",
            {"model_heads": 6, "model_kv_heads": 6, "model_head_dim": 8},
            "the query heads of layer 0: 6",
        ),
        ("", {"model_heads": 8, "model_kv_heads": 2}, "the key and value heads of layer 0: 2"),
        ("paired_heads", {"model_heads": 4, "model_kv_heads": 4}, "heads of layer 0: 2, each of 2"),
        ("attn_sink", {"model_heads": 4, "model_kv_heads": 4}, "'attn_sink' has a function of"),
    ],
)
def test_heads_that_cannot_be_exchanged_say_why(
    plugins: str, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(minillm.MinillmError, match=why) as refused:
        chosen(plan_of(plugins, **settings, mesh_context_exchange="heads"), 4)
    assert refused.value.fix == "mesh.context_exchange=keys"
    found = chosen(plan_of(plugins, **settings), 4)
    assert found.way == KEYS
    cheaper = settings["model_heads"] / settings["model_kv_heads"] + 1 < 4
    assert (why in found.note) == cheaper
