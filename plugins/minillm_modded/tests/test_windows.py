"""Windows: who sees how far and when, and that documents are kept apart."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.backends.requests import requests_of
from minillm_core.errors import PlanError
from minillm_core.nn.rope import llama_frequencies
from minillm_core.plan.plan import as_json
from minillm_core.plan.stages import stages_of
from minillm_modded.attn_scale import AttnScale
from minillm_modded.half_rope import HalfRope, half_truncated
from minillm_modded.paired_heads import PairedHeads
from minillm_modded.windows import Windows, long_layers, long_windows, sharpness, yarn


@pytest.mark.parametrize(
    ("layers", "long"),
    [
        (12, (0, 4, 7, 11)),  # the record's
        (1, (0,)),
        (2, (0, 1)),
        (4, (0, 3)),
        (6, (0, 5)),
        (24, (0, 3, 7, 10, 13, 16, 20, 23)),
    ],
)
def test_long_layers_are_the_ends_and_evenly_between(layers: int, long: tuple[int, ...]) -> None:
    assert long_layers(layers) == long


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 16), st.integers(1, 256))
def test_windows_grow_by_blocks_up_to_the_last(
    start: int, last: int, count: int, block: int
) -> None:
    start = min(start, last)
    windows = long_windows(start, last, count, block)
    assert len(windows) == count
    assert windows == sorted(windows)
    assert windows[-1] == last
    assert all(window % block == 0 or window == last for window in windows)
    assert count == 1 or start <= windows[0] < start + block


def stages(plan: Any) -> list[tuple[int, int]]:
    """(long, short) of each stage."""
    return [(s["windows.window.long"], s["windows.window.short"]) for s in stages_of(plan)]


def seen(plan: Any, layer: int) -> str | float | None:
    window = plan.spec.blocks[layer].attention.window
    return window.value or window.constant


def test_four_stages_of_a_row_of_1024(lab: Any) -> None:
    plan = lab.plan(Windows(), seq_len=1024)
    assert stages(plan) == [(256, 128), (512, 256), (768, 384), (1024, 512)]
    assert [seen(plan, layer).rpartition(".")[2] for layer in range(4)] == [
        "long",
        "short",
        "short",
        "long",
    ]
    knots = plan.schedules["windows.window.long"][1].knots
    assert [start for start, _ in knots] == [0, 0.25, 0.5, 0.75]
    assert plan.values(0.25)["windows.window.long"] == 256  # a stage ends with its last step
    assert plan.values(0.26)["windows.window.long"] == 512


def test_the_record_on_its_rows(lab: Any) -> None:
    plan = lab.plan(Windows(), layers=12, seq_len=65_536)
    assert stages(plan) == [(256, 128), (768, 384), (1280, 640), (1792, 896)]
    last = plan.values(1.0)
    assert (last["windows.window.long"], last["windows.window.short"]) == (1792, 896)


def test_a_row_that_no_window_cuts_has_one_stage(lab: Any) -> None:
    plan = lab.plan(Windows(), seq_len=128)
    assert plan.staged == ()
    assert [seen(plan, layer) for layer in range(4)] == [128] * 4


def test_one_window_for_the_whole_run(lab: Any) -> None:
    plan = lab.plan(Windows(window=100, stages=1, block=16, long=[1]), seq_len=256)
    assert plan.staged == ()
    assert [seen(plan, layer) for layer in range(4)] == [64, 100, 64, 64]


def test_what_it_asks_of_the_kernel(lab: Any) -> None:
    facts = {}
    for documents in (False, True):
        plan = lab.plan(Windows(documents=documents), seq_len=1024)
        asked = requests_of(plan, backend="torch", device="cuda", dtype="bfloat16", compiled=True)
        (facts[documents],) = (request.facts for request in asked if request.op == "attention")
        assert ("documents" in plan.fields) == documents
    assert [(facts[d]["window"], facts[d]["documents"]) for d in (False, True)] == [
        ("static", False),
        ("static", True),
    ]


SMALL = {"window": 3, "stages": 1, "block": 1, "long": "all"}


@pytest.mark.parametrize("others", [(), (PairedHeads(),)])
def test_a_token_sees_its_window_a_layer(lab: Any, others: tuple[Any, ...]) -> None:
    """With L layers of W keys, what stands L (W - 1) tokens back reaches a token, and no more.

    Paired heads count both heads of a token: of 3 keys, 1 or 2 are of earlier places.
    """
    model = lab.model(lab.plan(Windows(**SMALL), *others, layers=2))
    batch = lab.batch(rows=1, length=9)
    before = model.hidden(batch)
    changed = {**batch, "ids": batch["ids"].copy()}
    changed["ids"][0, 0] += 1
    moved = np.abs(model.hidden(changed) - before).max(axis=(0, 2)) > 1e-12
    reach = 2 * (3 - 1) if not others else 2
    assert moved.tolist() == [column <= reach for column in range(9)]


@pytest.mark.parametrize("others", [(), (PairedHeads(),)])
def test_documents_do_not_see_each_other(lab: Any, others: tuple[Any, ...]) -> None:
    model = lab.model(lab.plan(Windows(documents=True, window=64), *others))
    batch = {**lab.batch(rows=2, length=9), "documents": np.array([[0] * 4 + [1] * 5, [2] * 9])}
    before = model.hidden(batch)
    changed = {**batch, "ids": batch["ids"].copy()}
    changed["ids"][:, 2] = (changed["ids"][:, 2] + 1) % 29
    moved = np.abs(model.hidden(changed) - before).max(axis=2) > 1e-12
    assert moved[0].tolist() == [2 <= column < 4 for column in range(9)]
    assert moved[1].tolist() == [column >= 2 for column in range(9)]


# YaRN

RISING = st.lists(st.integers(1, 5000), min_size=1, max_size=5, unique=True).map(sorted)
YARN = {"start": 4, "window": 16, "stages": 3, "block": 4, "yarn": True}


@given(windows=RISING, base=st.floats(2, 1e6))
def test_rotations_are_those_of_the_formula(windows: list[int], base: float) -> None:
    """Pair by pair, in Python's numbers; a pair that does not turn stays."""
    theta = half_truncated(16, base)
    for now in windows:
        got = yarn(theta, now, windows)
        for start, scaled in zip(theta, got, strict=True):
            for before, after in itertools.pairwise(w for w in windows if w <= now):
                turns = before * start / (2 * math.pi)
                kept = min(1.0, max(0.0, (turns - 1) / 31))
                start = start * (before / after + kept * (1 - before / after))
            assert scaled == pytest.approx(start, rel=1e-12)


@given(windows=RISING)
def test_slow_pairs_turn_in_a_longer_window_as_in_the_one_before(windows: list[int]) -> None:
    slow, fast = np.array([1e-9]), np.array([1e3])
    assert windows[-1] * yarn(slow, windows[-1], windows) == pytest.approx(windows[0] * slow)
    assert yarn(fast, windows[-1], windows) == fast


def test_the_record_s_scale() -> None:
    """0.1 at 3 blocks of 128; its README says that it ranges between 0.1 and 0.14."""
    windows = [128 * blocks for blocks in (3, 7, 11, 13)]
    scales = [0.1 * sharpness(window, windows) for window in windows]
    assert scales == pytest.approx([0.1, 0.116946, 0.127518, 0.131778], abs=1e-6)


@pytest.mark.parametrize("others", [(), (HalfRope(),), (PairedHeads(),)], ids=len)
def test_each_stage_has_its_rotations_and_its_scale(lab: Any, others: tuple[Any, ...]) -> None:
    """Of the long windows, in short layers too."""
    plan = lab.plan(Windows(**YARN), *others, dim=64, seq_len=16)
    net = lab.model(plan).net
    windows = [4, 12, 16]
    (scaling,) = {block.attention.rope.scaling for block in plan.spec.blocks}
    assert as_json(scaling[2])[0] == [
        "window",
        {"value": "windows.rope.window", "numbers": windows},
    ]
    start = (
        half_truncated(16, 1024.0)
        if any(isinstance(one, HalfRope) for one in others)
        else llama_frequencies(16, 1e4)
    )
    for progress, window in zip((0.1, 0.5, 1.0), windows, strict=True):
        values = plan.values(progress)
        assert values["windows.scale"] == 16**-0.5 * sharpness(window, windows)
        for layer in net.layers:
            tables = layer.attention.rope.at(values)
            theta = yarn(start, window, windows)
            assert tables.frequencies == pytest.approx(theta, rel=1e-6)
            angles = np.outer(np.arange(len(tables.cos)), theta)
            assert np.abs(tables.cos - np.cos(angles)).max() < 1e-6


def test_in_the_first_stage_nothing_differs(lab: Any) -> None:
    batch = lab.batch(rows=1, length=16)
    plans = [lab.plan(Windows(**{**YARN, "yarn": on}), seq_len=16) for on in (False, True)]
    for progress, same in ((0.1, True), (0.5, False), (1.0, False)):
        plain, ours = (lab.model(p).net.hidden(batch, p.values(progress))[0] for p in plans)
        assert (np.abs(plain - ours).max() < 1e-12) == same


def test_windows_that_do_not_grow_leave_rotations_alone(lab: Any) -> None:
    plan = lab.plan(Windows(yarn=True, scale=1.13), seq_len=64)
    attention = plan.spec.blocks[0].attention
    assert (plan.staged, attention.rope.scaling) == ((), None)
    assert attention.scale.constant == 1.13 * 8**-0.5


def test_a_scale_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ValueError, match="scale is for yarn=true"):
        Windows(scale=1.13)


def test_who_else_scales_attention_is_refused(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"attention\.scale is claimed by both") as refused:
        lab.plan(Windows(**YARN), AttnScale())
    assert "leave out 'attnscale' or 'windows'" in str(refused.value.fix)
