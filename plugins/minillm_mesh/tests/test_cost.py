"""The cost model: small cases computed by hand, and monotonicity."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import ConfigError
from minillm_mesh.cost import (
    CARDS,
    MOST,
    MOVED,
    SLOWED,
    SPREAD,
    Card,
    Collective,
    Work,
    card_of,
    seconds,
    sent,
    slowest,
    times,
)

ROUND = Card("round", 1e12, 1e9, 1e9, link=8e9, network=1e9, host=4, utilisation=0.5, reached=0.5)
KINDS = st.sampled_from([*MOVED])
SIZE = st.floats(1.0, 1e12)
RANKS = st.integers(1, MOST)
CARD = st.sampled_from([*CARDS.values()])


def test_a_ring_in_a_host_by_hand() -> None:
    # 4 cards, 4 GB/s achieved: an all-reduce sends 3/2 of 8 GB in 6 hops, an all-gather half of both
    assert sent("all-reduce", 8e9, 4) == 12e9
    assert seconds("all-reduce", 8e9, 4, ROUND) == pytest.approx(8.4e-6 + 6 * 3.4e-6 + 3.0)
    assert seconds("all-gather", 8e9, 4, ROUND) == pytest.approx(8.4e-6 + 3 * 3.4e-6 + 1.5)
    assert seconds("reduce-scatter", 8e9, 4, ROUND) == seconds("all-gather", 8e9, 4, ROUND)


def test_a_ring_over_hosts_goes_at_the_pace_of_all_their_lines() -> None:
    # 2 hosts of 4 links of 1 GB/s: 4 GB/s, less than the inner link's 8, and half of it is achieved
    expected = 8.4e-6 + 9.6e-6 + 6 * 3.4e-6 + 7 / 8 * 8e9 / 2e9
    assert seconds("all-gather", 8e9, 8, ROUND) == pytest.approx(expected)


def test_an_all_to_all_is_as_slow_as_its_way_out() -> None:
    # 4/7 of 7/8 of 8 GB leave the host, over one link of 1 GB/s
    expected = 8.4e-6 + 3 * 3.4e-6 + 4 * 9.6e-6 + 4e9 / 1e9 / 0.5
    assert seconds("all-to-all", 8e9, 8, ROUND) == pytest.approx(expected)


def test_neighbours_that_are_apart_are_on_more_hosts() -> None:
    # hosts of 4: pairs of ranks 2 apart share one, those 4 apart never do; 4 ranks 2 apart are on two
    near, far = (seconds("all-gather", 8e9, 2, ROUND, stride) for stride in (2, 4))
    assert near == seconds("all-gather", 8e9, 2, ROUND)
    assert far == pytest.approx(8.4e-6 + 9.6e-6 + 4e9 / 1e9 / 0.5)
    pairs = seconds("all-gather", 8e9, 4, ROUND, 2)
    assert pairs == pytest.approx(8.4e-6 + 9.6e-6 + 2 * 3.4e-6 + 6e9 / 2e9 / 0.5)
    other = Collective("x", "all-gather", 16e9, turns=2, among=2, stride=4)
    assert other.seconds(8, ROUND) == pytest.approx(2 * far)


def test_many_cards_add_little_up_in_a_tree() -> None:
    card = CARDS["h200"]
    ring = 8.4e-6 + 2 * 127 * 9.6e-6 + (2 * 1023 - 2 * 127) * 3.4e-6
    tree = 2 * (7 * 28e-6 + 7 * 50e-6) + 2 * 1024 / (0.9 * 0.7 * 400e9)
    assert seconds("all-reduce", 1024, 1024, card) == pytest.approx(min(ring, tree))
    assert tree < ring


def test_a_step_by_hand() -> None:
    # 1 GFLOP at half of 1 TFLOP/s is 2 ms; 1 MB of the update 1 ms; 8 MB over 2 cards 2 ms and its hops
    beside = Collective("early", "all-reduce", 8e6, beside=0.25)
    after = Collective("late", "all-gather", 8e6)
    found = times(Work(1e9, 0.5e9, 1e6, (beside, after)), 2, ROUND)
    early, late = 8.4e-6 + 2 * 3.4e-6 + 2e-3, 8.4e-6 + 3.4e-6 + 1e-3
    assert found.computing == pytest.approx(2e-3)
    assert found.update == pytest.approx(2e-3)
    assert found.exposed == pytest.approx(early - 0.5e-3 + late)
    assert found.slowed == pytest.approx(SLOWED * 0.5e-3)
    assert found.waiting == pytest.approx(SPREAD * slowest(2) * 2e-3)
    assert found.share == pytest.approx((found.exposed + found.slowed) / found.total)
    assert found.alone == pytest.approx({"early": early, "late": late})


def test_one_card_neither_sends_nor_waits() -> None:
    found = times(Work(1e15, exchanges=(Collective("all", "all-reduce", 1e9),)), 1, CARDS["h100"])
    assert found.total == found.computing
    assert found.share == 0.0


@pytest.mark.parametrize("ranks", [2, 8, 128])
def test_the_slowest_is_the_largest_of_normal_numbers(ranks: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((20_000, ranks)).max(1).mean()
    assert slowest(ranks) == pytest.approx(drawn, abs=0.03)
    assert slowest(1) == NormalDist().inv_cdf(0.5) == 0.0


@given(KINDS, SIZE, SIZE, RANKS, CARD)
def test_more_bytes_take_longer(
    kind: str, size: float, more: float, ranks: int, card: Card
) -> None:
    one, two = (seconds(kind, s, ranks, card) for s in (size, size + more))
    assert 0.0 <= one <= two
    assert sent(kind, size, ranks) <= sent(kind, size + more, ranks)


@given(KINDS, SIZE, RANKS, CARD, st.floats(1.0, 4.0))
def test_a_faster_card_takes_no_longer(
    kind: str, size: float, ranks: int, card: Card, times_faster: float
) -> None:
    for key in ("link", "network"):
        faster = card_of(f"{card.name},{key}={getattr(card, key) * times_faster}")
        assert seconds(kind, size, ranks, faster) <= seconds(kind, size, ranks, card)


@given(st.floats(1e9, 1e18), SIZE, RANKS, CARD, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_what_is_beside_computing_costs_no_more(
    flops: float, size: float, ranks: int, card: Card, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    totals = [
        times(Work(flops, exchanges=(Collective("x", "all-reduce", size, beside=b),)), ranks, card)
        for b in (less, more)
    ]
    assert totals[1].total <= totals[0].total * (1 + 1e-12)
    assert all(0.0 <= found.share <= 1.0 for found in totals)


@given(KINDS, SIZE, st.integers(1, 7), CARD)
def test_another_card_of_a_host_makes_nothing_quicker(
    kind: str, size: float, ranks: int, card: Card
) -> None:
    work = Work(1e15, exchanges=(Collective("x", kind, size),))
    before, after = (times(work, n, card) for n in (ranks, ranks + 1))
    assert before.waiting < after.waiting
    assert before.total <= after.total


def test_cards_are_read() -> None:
    assert card_of("H100") == CARDS["h100"]
    own = card_of("h100,utilisation=0.5, network=25e9")
    assert (own.utilisation, own.network, own.flops) == (0.5, 25e9, CARDS["h100"].flops)
    whole = card_of("flops=1e15,memory=96e9,bandwidth=4e12,link=4e11,network=5e10,host=4")
    assert (whole.flops, whole.host, whole.name) == (1e15, 4, "a card of these numbers")


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("h10", "there is no card 'h10'", "did you mean h100?"),
        ("h100,b200", "there is no card 'b200'", ""),
        ("h100,flop=1", "a card has no number 'flop'", "did you mean flops?"),
        ("h100,flops=fast", "flops is not a number above 0", ""),
        ("h100,host=0.5", "host is not a whole number of at least 1", ""),
        ("h100,host=2.7", "host is not a whole number of at least 1", ""),
        ("h100,host=inf", "host is not a whole number of at least 1", ""),
        ("h100,utilisation=1.5", "utilisation is not a number above 0 and at most 1", ""),
        (
            "flops=1e15",
            "the description of the card is incomplete",
            "add memory=..., bandwidth=...",
        ),
    ],
)
def test_what_is_no_card_is_refused(text: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        card_of(text)
    assert what in refused.value.what
    assert fix in (refused.value.fix or "")


def test_more_cards_than_the_model_is_meant_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not cover this many"):
        times(Work(1e9), MOST + 1, CARDS["h100"])
