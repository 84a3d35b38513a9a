"""Tests of the techniques with cards, their division among devices, and the cards' places."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.card_child import Child, State, visible
from benchmarks.card_job import DONE, OVER, READY, Share
from benchmarks.card_table import REFERENCE, SHAPE, TABLE, Judged, active, divided
from benchmarks.card_turns import Turns
from benchmarks.costs_page import PAGE, WITHOUT, cards, decoding, equal_seconds
from benchmarks.decoding import PLUGINS
from minillm_core.config.values import show
from minillm_core.plugins.manager import find
from minillm_lab.card import FOLDER, PAIRS, read_cards
from tools.repository import ours

NO_CARD = {name for names in WITHOUT.values() for name in names}


def test_every_first_party_technique_is_judged_once() -> None:
    judged = [one.plugin for one in TABLE]
    assert len(judged) == len(set(judged))
    assert set(judged) == set(ours()) - NO_CARD


def test_every_plugin_without_a_card_has_one_reason_on_the_page() -> None:
    assert len(NO_CARD) == sum(map(len, WITHOUT.values()))
    assert set(ours()) >= NO_CARD
    page = PAGE.text()
    listed = page.partition("<!-- made: without_card -->")[2].partition("<!-- /made -->")[0]
    assert all(f"`{name}`" in listed for name in NO_CARD)


def test_every_card_without_equal_seconds_has_its_reason_on_the_page() -> None:
    shown = cards()
    assert {card.plugin for card in shown} == {one.plugin for one in TABLE}
    text = equal_seconds(shown)
    for card in shown:
        listed = f"| `{card.plugin}` | {card.effect:+.3f} |" in text
        assert listed == (card.equal_seconds is None), card.plugin
    plain = [card for card in shown if card.equal_seconds is not None]
    assert equal_seconds(plain).startswith(f"{len(plain)} of {len(plain)} cards")
    assert "| why" not in equal_seconds(plain)


@pytest.mark.parametrize("judged", TABLE, ids=lambda one: one.plugin)
def test_every_judged_technique_ships_its_card(judged: Judged) -> None:
    origin = find(judged.plugin).origin
    card, *sizes = read_cards(judged.plugin, [Path(origin.file).parent / FOLDER])
    assert all(one.setting == sizes[0].setting != card.setting for one in sizes)
    assert card.company == judged.beside
    assert len(card.seeds) >= PAIRS
    assert card.commit
    options = {f"{card.plugin}.{name}={show(value)}" for name, value in card.options.items()}
    assert options.issuperset(judged.options)


@given(judged=st.lists(st.sampled_from(TABLE), unique=True), parts=st.integers(1, 8))
def test_each_is_in_one_share_and_no_set_in_two(judged: list[object], parts: int) -> None:
    shares = divided(judged, parts)  # pyright: ignore[reportArgumentType]
    assert sorted(one.plugin for share in shares for one in share) == sorted(
        one.plugin  # pyright: ignore[reportAttributeAccessIssue]
        for one in judged
    )
    sets = [set().union(*(one.sets for one in share)) for share in shares]
    assert sum(map(len, sets)) == len(set().union(*sets))
    assert len(shares) <= parts
    for share in shares:
        assert set(REFERENCE) <= set(active(share))


def test_a_share_is_read_as_it_was_written() -> None:
    share = Share("out", TABLE[:5], "small", SHAPE, 550, 5, "cuda", "cache", None)
    assert Share.of(share.data()) == share


@pytest.mark.parametrize("name", ["minillm_muon", "minillm_modded", "minillm_liger"])
def test_a_wheel_holds_the_cards(name: str, repository: Path, tmp_path: Path) -> None:
    root = tmp_path / name
    shutil.copytree(repository / "plugins" / name, root)
    folder = root / name / "cards"
    folder.mkdir(exist_ok=True)
    (folder / "some.json").write_text("{}")
    held = {one.distribution_path for one in WheelBuilder(str(root)).recurse_included_files()}
    assert f"{name}/cards/some.json" in held


@pytest.mark.parametrize("reference", [True, False])
def test_a_child_is_where_its_words_say(reference: bool) -> None:
    share = Share("out", TABLE[:1], "small", SHAPE, 550, 5, "cuda", "cache", None)
    child = Child(share, 0, "baseline", reference=reference)
    assert (child.state, child.busy, child.over) == (State.WAITING, False, False)
    last = State.RESTING if reference else State.ENDING
    for word, state in ((READY, State.READY), (OVER, State.DRAWING), (DONE, last)):
        child.take(word)
        assert child.state is state
        assert child.busy == (word != DONE)
    child.take("something else")
    assert child.state is last
    child.take(DONE)  # the reference's runs at equal seconds are finished, too
    assert child.over
    child.take(None)
    assert (child.state, child.failure) == (State.ENDED, None)


def test_one_that_compiles_for_long_does_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(child: Child, heard: object, threads: int) -> None:
        child.state = State.COMPILING

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(Child, "grant", lambda child: setattr(child, "state", State.TRAINING))
    share = Share("out", TABLE[:1], "small", SHAPE, 550, 5, "cuda", "cache", None)
    said: list[str] = []
    given = {"seconds": 60.0, "patience": 0.0, "ahead": 2, "reserve": 0.0, "say": said.append}
    turns = Turns([(share, ("baseline", "slow", "next"))], **given)
    first, slow, following = turns.children
    turns._next(turns.children)
    assert [child.state for child in turns.children] == [State.COMPILING] * 2 + [State.WAITING]
    first.take(READY)
    turns._next(turns.children)
    assert (first.state, following.state) == (State.TRAINING, State.WAITING)
    first.take(DONE)
    turns._next(turns.children)
    assert (slow.state, following.state) == (State.COMPILING, State.COMPILING)
    assert said == ["device 0, slow: still compiles; the next ones start"]


def test_a_share_gets_one_of_the_gpus_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(2) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [visible(0), visible(1)] == ["5", "7"]


def test_decoding_is_on_the_page_with_where_it_was_measured() -> None:
    environment = {
        "date": "2026-02-03T04:05:06+00:00",
        "commit": "abcdef0123",
        "hardware": {"cores": 4, "processor": "Some", "system": "Linux 6", "gpus": []},
        "versions": {"python": "3.11", "torch": "2.11", "mlx": None},
    }
    rows = [
        {
            **{"plugin": name, "tokens": 1000, "cached_seconds": 2.0, "again_seconds": 30.0},
            **{"faster": 15.0, "cache_bytes": 2048, "largest_difference": 5.1e-07},
        }
        for name in ("plain", *filter(None, PLUGINS))
    ]
    document = {"environment": environment, "figures": {"backend": "torch", "rows": rows}}
    shown = decoding(document)
    assert "| plain | 2.0 | 30.0 | 15.0 | 2,048 | 5e-07 |" in shown
    assert "| `mla` | 2.0 |" in shown
    assert shown.endswith(
        "`python -m benchmarks.decoding`, 1,000 tokens, torch: 4 cores (Some), Linux; Python 3.11, "
        "PyTorch 2.11; commit abcdef0; 2026-02-03."
    )
    del rows[1]
    assert decoding(document).endswith(f" Not measured yet: `{PLUGINS[1]}`.")
    document["figures"]["model"] = "gpt2-124m"  # measured with some of them
    assert "`python -m benchmarks.decoding --model gpt2-124m`, 1,000 tokens" in decoding(document)
    assert "Not measured" not in decoding(document)
