"""Tests of the merge kinds without a model: claims, chains, terms."""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.errors import PlanError
from minillm_core.nn.node import Node
from minillm_core.plugins.slots import Chain, Claim, Terms

ANCHORS = ("early", "middle", "late")


def node(name: str, owner: str | None = None) -> Node:
    return Node(name=name, owner=owner or name, reference=f"module:{name}")


def test_a_claim_replaces_the_default() -> None:
    claim: Claim[int] = Claim("attn.window")
    assert claim.resolve(7) == 7
    assert claim.owner == "core"
    claim.add("a", 3)
    assert claim.resolve(7) == 3
    assert claim.owner == "a"


@pytest.mark.parametrize("order", list(permutations(("one", "two", "three"))))
def test_a_second_claimant_is_refused_by_name_slot_and_way_out(order: tuple[str, ...]) -> None:
    claim: Claim[int] = Claim("layers.3.attention.layout", layered={"one", "three"})
    for owner in order:
        claim.add(owner, 1)
    with pytest.raises(PlanError) as refused:
        claim.resolve()
    assert "layers.3.attention.layout is claimed by both 'one' and 'three'" in refused.value.what
    assert refused.value.where == "layers.3.attention.layout"
    assert "leave out 'one' or 'three'" in str(refused.value.fix)
    assert "'one.layers=[0]' 'three.layers=[1]'" in str(refused.value.fix)


@pytest.mark.parametrize("layered", [(), {"one"}, {"two", "three"}])
def test_layers_are_no_way_out_for_who_cannot_be_told_any(layered: Collection[str]) -> None:
    claim: Claim[int] = Claim("loss.logits[cap]", layered=layered)
    claim.add("one", 1)
    claim.add("two", 2)
    with pytest.raises(PlanError) as refused:
        claim.resolve()
    assert "leave out 'one' or 'two'" in str(refused.value.fix)
    assert "layers" not in str(refused.value.fix)


def test_one_plugin_may_not_claim_twice() -> None:
    claim: Claim[int] = Claim("loss.logits")
    claim.add("a", 1)
    with pytest.raises(PlanError, match=r"'a' claims slot loss\.logits twice"):
        claim.add("a", 1)


@given(st.permutations(["a", "b", "c", "d", "e"]))
def test_a_chain_orders_by_anchor_then_by_what_is_stated(order: list[str]) -> None:
    stated = {
        "a": ("late", (), ()),
        "b": ("early", (), ("c",)),
        "c": ("early", (), ()),
        "d": ("middle", ("e", "absent"), ()),
        "e": ("middle", (), ()),
    }
    chain = Chain("attn.out", ANCHORS)
    for name in order:
        anchor, before, after = stated[name]
        chain.add(anchor, node(name), before, after)
    assert [link.name for _, link in chain.resolve()] == ["c", "b", "d", "e", "a"]
    assert [anchor for anchor, _ in chain.resolve()] == [
        "early",
        "early",
        "middle",
        "middle",
        "late",
    ]


def test_two_nodes_at_one_anchor_need_an_order() -> None:
    chain = Chain("attn.out", ANCHORS)
    chain.add("late", node("b"))
    chain.add("late", node("a"))
    with pytest.raises(PlanError) as refused:
        chain.resolve()
    assert "order of 'a' and 'b' in attn.out.late is not stated" in refused.value.what
    assert "before= or after=" in str(refused.value.fix)


@pytest.mark.parametrize("wishes", [{"a": ("b",), "b": ("a",)}, {"a": ("a",)}])
def test_an_order_that_goes_round_is_refused(wishes: dict[str, tuple[str, ...]]) -> None:
    chain = Chain("attn.out", ANCHORS)
    for name, before in wishes.items():
        chain.add("late", node(name), before)
    with pytest.raises(PlanError, match="is circular"):
        chain.resolve()


def test_a_closed_anchor_keeps_others_out_and_says_why() -> None:
    chain = Chain("layers.0.attention.out", ANCHORS)
    chain.add("late", node("own", "closer"))
    chain.close("closer", "late", "heads are paired")
    assert len(chain.resolve()) == 1  # its own nodes may remain
    chain.add("late", node("other"), after=("own",))
    with pytest.raises(PlanError) as refused:
        chain.resolve()
    assert "'other' cannot join layers.0.attention.out.late" in refused.value.what
    assert "'closer' closed it (heads are paired)" in refused.value.what
    assert "leave out 'closer' or 'other'" in str(refused.value.fix)


def test_two_nodes_of_one_name_are_refused() -> None:
    chain = Chain("attn.out", ANCHORS)
    chain.add("late", node("a_b", "a"))
    chain.add("early", node("a_b", "a_b"))
    with pytest.raises(PlanError, match="two nodes named 'a_b'"):
        chain.resolve()


@given(st.permutations(range(6)))
def test_terms_are_sorted_by_key_whoever_came_first(order: list[int]) -> None:
    terms: Terms[int] = Terms("model.streams")
    for key in order:
        terms.add(f"owner{key % 2}", f"key{key}", key)
    assert terms.resolve() == tuple((f"key{i}", f"owner{i % 2}", i) for i in range(6))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("b", r"loss.target\[offset2\] is added by both 'a' and 'b'"),
        ("a", r"plugin 'a' adds loss.target\[offset2\] twice"),
    ],
)
def test_a_term_is_added_once(second: str, message: str) -> None:
    terms: Terms[int] = Terms("loss.target")
    terms.add("a", "offset2", 1)
    with pytest.raises(PlanError, match=message):
        terms.add(second, "offset2", 2)


@pytest.mark.parametrize(("early", "late"), [({}, {"before": ("a",)}), ({"after": ("b",)}, {})])
def test_anchors_come_before_what_nodes_say(early: dict, late: dict) -> None:
    chain = Chain("attn.out", ANCHORS)
    chain.add("early", node("a"), **early)
    chain.add("late", node("b"), **late)
    with pytest.raises(PlanError, match="the order of the anchors is fixed") as refused:
        chain.resolve()
    assert "'a'" in refused.value.what
    assert "'b'" in refused.value.what


@pytest.mark.parametrize(("early", "late"), [({}, {"after": ("a",)}), ({"before": ("b",)}, {})])
def test_what_anchors_say_may_be_said_again(early: dict, late: dict) -> None:
    chain = Chain("attn.out", ANCHORS)
    chain.add("late", node("b"), **late)
    chain.add("early", node("a"), **early)
    assert [anchor for anchor, _ in chain.resolve()] == ["early", "late"]
