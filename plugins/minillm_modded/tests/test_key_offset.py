"""Tests of the key offset against its definition, feature by feature, and of its requirements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_modded.half_rope import HalfRope
from minillm_modded.key_offset import KeyOffset, OffsetAcross, OffsetWithin
from minillm_modded.paired_heads import PairedHeads
from minillm_modded.windows import long_layers


@pytest.mark.parametrize("within", [False, True])
def test_features_that_do_not_turn_are_the_token_befores(
    node: Any, lab: Any, rng: Any, within: bool
) -> None:
    offset = node(OffsetWithin if within else OffsetAcross)
    q, k = rng.standard_normal((2, 9, 4, 8)), rng.standard_normal((2, 9, 2, 8))
    documents = lab.batch()["documents"]
    assert (documents[:, 1:] != documents[:, :-1]).any()
    same, got = offset(q, k, documents) if within else offset(q, k)
    np.testing.assert_array_equal(same, q)
    for b in range(2):
        for t in range(9):
            begins = t == 0 or (within and documents[b, t] != documents[b, t - 1])
            for i in range(8):
                moved = i in (2, 3, 6, 7) and not begins
                np.testing.assert_array_equal(got[b, t, :, i], k[b, t - 1 if moved else t, :, i])


def test_exactly_the_moved_features_stand_still(lab: Any, rng: Any) -> None:
    plan = lab.plan(KeyOffset(layers=Layers([0])), HalfRope(), dim=64)
    rope = lab.model(plan).net.layers[0].attention.rope
    x = rng.standard_normal((1, 6, 4, 16))
    turned, _ = lab.model(plan).net.ops.rotate(x, x, rope(None))
    moves = np.abs(turned - x).max((0, 1, 2)) > 0
    np.testing.assert_array_equal(moves, [i % 8 < 4 for i in range(16)])


def test_it_goes_where_windows_are_long(lab: Any) -> None:
    plan = lab.plan(KeyOffset(), HalfRope(), layers=6)
    slots = [p.slot for p in plan.placements if p.owner == "keyoffset"]
    assert slots == [f"layers.{layer}.attention.qk.shift" for layer in long_layers(6)]


def test_without_half_of_the_features_at_rest_it_is_refused(lab: Any) -> None:
    with pytest.raises(PlanError) as refused:
        lab.plan(KeyOffset())
    assert "moves the features without rotation" in refused.value.what
    assert "add 'half_rope'" in str(refused.value.fix)
    with pytest.raises(PlanError, match="layer 3"):
        lab.plan(KeyOffset(layers=Layers([3])), HalfRope(layers=Layers([0])))


def test_paired_heads_leave_no_room_for_it(lab: Any) -> None:
    with pytest.raises(PlanError, match="rotates q and k after they are rearranged"):
        lab.plan(KeyOffset(), HalfRope(), PairedHeads())
    assert lab.plan(KeyOffset(layers=Layers([0])), HalfRope(), PairedHeads(layers=Layers([1, 2])))
