"""Tests of attention windows: range per layer and stage, and separation of documents."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import Layers
from minillm_core.backends.bind import requests_of
from minillm_core.errors import PlanError
from minillm_core.nn.rope import llama_frequencies
from minillm_core.plan import stages_of
from minillm_core.plan.plan import as_json
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
    """Return (long, short) of each stage."""
    return [(s["windows.window.long"], s["windows.window.short"]) for s in stages_of(plan)]


def followed(plan: Any, layer: int) -> str:
    """Return ``long`` or ``short``: the windows that the layer uses."""
    value = plan.spec.blocks[layer].attention.window.value
    assert isinstance(value, str)
    return value.rpartition(".")[2]


def constant(plan: Any, layer: int) -> float:
    """Return the constant window of a layer."""
    number = plan.spec.blocks[layer].attention.window.constant
    assert number is not None
    return number


def test_four_stages_of_a_row_of_1024(lab: Any) -> None:
    plan = lab.plan(Windows(), seq_len=1024)
    assert stages(plan) == [(256, 128), (512, 256), (768, 384), (1024, 512)]
    assert [followed(plan, layer) for layer in range(4)] == [
        "long",
        "short",
        "short",
        "long",
    ]
    knots = plan.schedules["windows.window.long"][1].knots
    assert [start for start, _ in knots] == [0, 0.25, 0.5, 0.75]
    assert plan.values(0.25)["windows.window.long"] == 256  # a stage includes its last step
    assert plan.values(0.26)["windows.window.long"] == 512


def test_the_record_on_its_rows(lab: Any) -> None:
    plan = lab.plan(Windows(), layers=12, seq_len=65_536)
    assert stages(plan) == [(256, 128), (768, 384), (1280, 640), (1792, 896)]
    last = plan.values(1.0)
    assert (last["windows.window.long"], last["windows.window.short"]) == (1792, 896)


def test_windows_that_reach_over_a_row_have_one_stage(lab: Any) -> None:
    plan = lab.plan(Windows(), seq_len=256)
    assert plan.staged == ()
    assert [constant(plan, layer) for layer in range(4)] == [256, 128, 128, 256]


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({}, 64),
        ({}, 128),
        ({"long": "all"}, 256),
        ({"start": 512, "block": 512}, 512),
        ({"stages": 1, "long": "all"}, 1024),
        ({}, 1),
    ],
)
def test_windows_that_hide_nothing_are_told(lab: Any, options: dict[str, Any], row: int) -> None:
    (note,) = lab.plan(Windows(**options), seq_len=row).notes
    assert note.startswith(f"windows: no window is shorter than a row of {row} tokens")
    for named in ("windows.start=", "windows.window=", "windows.block="):
        assert named in note
    assert lab.plan(Windows(**options, documents=True), seq_len=row).notes == ()


@given(
    row=st.integers(2, 3000),
    start=st.integers(1, 4000),
    more=st.integers(0, 4000),
    count=st.integers(1, 6),
    block=st.integers(1, 512),
    every=st.booleans(),
)
@settings(max_examples=40)
def test_a_plan_hides_a_key_or_says_that_it_does_not(
    lab: Any, row: int, start: int, more: int, count: int, block: int, every: bool
) -> None:
    options: dict[str, Any] = {"window": start + more, "stages": count}
    options |= {"start": start} if count > 1 else {}
    options |= {"block": block, "long": "all" if every else [0]}
    plan = lab.plan(Windows(**options), seq_len=row, layers=2)
    numbers = [number for stage in stages_of(plan) for number in stage.values()]
    numbers += [block.attention.window.constant or row for block in plan.spec.blocks]
    assert (min(numbers) < row) == (plan.notes == ())


@pytest.mark.parametrize("start", [129, 512])
def test_windows_that_cannot_grow_are_told(lab: Any, start: int) -> None:
    plan = lab.plan(Windows(start=start, window=128, block=64), seq_len=256)
    (note,) = plan.notes
    assert note.startswith(f"windows: windows.start={start} is above windows.window=128")
    assert [constant(plan, layer) for layer in range(4)] == [128, 64, 64, 128]


def test_a_start_that_is_not_read_is_told(lab: Any) -> None:
    (note,) = lab.plan(Windows(start=64, window=128, stages=1), seq_len=256).notes
    assert note.startswith("windows: windows.start=64 has no effect with windows.stages=1")
    for start in (128, 256):  # the window, and the default
        assert not lab.plan(Windows(start=start, window=128, stages=1), seq_len=256).notes


@pytest.mark.parametrize(("block", "short"), [(16, 64), (128, 100)])
def test_one_window_for_the_whole_run(lab: Any, block: int, short: int) -> None:
    plan = lab.plan(Windows(window=100, stages=1, block=block, long=Layers([1])), seq_len=256)
    assert plan.staged == ()
    assert [constant(plan, layer) for layer in range(4)] == [short, 100, short, short]


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
    """With L layers of W keys, a token depends on tokens up to L (W - 1) before it, and no further.

    Paired heads count both heads of a token: of 3 keys, 1 or 2 belong to earlier tokens.
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
    model = lab.model(lab.plan(Windows(documents=True, window=64, stages=1), *others))
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
    """Compare pair by pair, in Python floats; an unrotated pair is unchanged."""
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
    """0.1 at 3 blocks of 128; the record's README gives a range of 0.1 to 0.14."""
    windows = [128 * blocks for blocks in (3, 7, 11, 13)]
    scales = [0.1 * sharpness(window, windows) for window in windows]
    assert scales == pytest.approx([0.1, 0.116946, 0.127518, 0.131778], abs=1e-6)


@pytest.mark.parametrize("others", [(), (HalfRope(),), (PairedHeads(),)], ids=len)
def test_each_stage_has_its_rotations_and_its_scale(lab: Any, others: tuple[Any, ...]) -> None:
    """Short layers use those of the long windows, too."""
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


CONSTANT = [
    ({}, 256, "windows.start=128 or less, or windows.yarn=false"),
    ({"start": 1792}, 2048, "windows.start=1664 or less, or windows.yarn=false"),
    ({"start": 300, "window": 500, "block": 512}, 1024, "windows.yarn=false"),
    ({"stages": 1}, 2048, "windows.stages=2 or more, or windows.yarn=false"),
]


@pytest.mark.parametrize(("options", "row", "fix"), CONSTANT)
def test_yarn_is_refused_where_windows_do_not_grow(
    lab: Any, options: dict[str, Any], row: int, fix: str
) -> None:
    lab.plan(Windows(**options), seq_len=row)
    with pytest.raises(PlanError, match=r"windows\.yarn rescales as windows grow") as refused:
        lab.plan(Windows(**options, yarn=True), seq_len=row)
    assert refused.value.fix == fix
    if typed := re.match(r"windows\.start=(\d+)", fix):
        assert lab.plan(
            Windows(**{**options, "start": int(typed[1])}, yarn=True), seq_len=row
        ).staged


def test_a_scale_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ValueError, match="scale is for yarn=true"):
        Windows(scale=1.13)


def test_who_else_scales_attention_is_refused(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"attention\.scale is claimed by both") as refused:
        lab.plan(Windows(**YARN), AttnScale())
    assert "leave out 'attnscale' or 'windows'" in str(refused.value.fix)
