"""Tests of technique cards: results survive a round trip, and invalid files are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from minillm_core.cli.main import main
from minillm_lab.card import (
    PAIRS,
    BadCard,
    Card,
    Scale,
    card_lines,
    card_sources,
    other_options,
    read_cards,
)
from minillm_lab.cards import write_card

FIRST = {
    "plugin": "muon",
    "version": "0.1.0",
    "effect": -0.04,
    "low": -0.05,
    "high": -0.03,
    "unit": "nats a token of held-out text, at equal tokens",
    "seeds": [0, 1, 2, 3, 4],
    "equal_seconds": {"effect": -0.02, "low": -0.03, "high": -0.01},
    "scale": {"parameters": 1_000_000, "tokens": 5_000_000, "preset": "tiny"},
    "company": ["paired_heads"],
    "options": {"lr": 0.02, "rows": [1, 2]},
    "hardware": "one GPU",
    "date": "2026-11-01",
    "commit": "0123456789abcdef",
    "cost": {"speed": {"effect": 0.98, "low": 0.97, "high": 0.99}, "peak_bytes": 1.01},
}

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
intervals = st.lists(finite, min_size=3, max_size=3).map(sorted)


@st.composite
def cards(draw: Callable[..., Any]) -> Card:
    low, effect, high = draw(intervals)
    return Card(
        plugin="muon",
        effect=effect,
        low=low,
        high=high,
        unit=draw(st.text(max_size=20)),
        seeds=tuple(range(draw(st.integers(PAIRS, 9)))),
        scale=Scale(parameters=draw(st.integers(1)), tokens=draw(st.integers(1))),
        company=tuple(draw(st.lists(st.text(max_size=9), max_size=3))),
        hardware=draw(st.text(max_size=20)),
        date=draw(st.dates(min_value=date(2000, 1, 1))),
    )


@settings(max_examples=20)
@given(card=cards())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, card: Card) -> None:
    folder = tmp_path_factory.mktemp("cards") / "new"
    assert write_card(folder, card).name == "muon.json"
    assert write_card(folder, card).parent == folder  # replaces the first
    assert read_cards("muon", [folder / "absent", folder]) == [card]
    assert [path.name for path in folder.iterdir()] == ["muon.json"]


@given(card=cards())
def test_an_interval_that_holds_zero_tells_nothing(card: Card) -> None:
    assert card.excludes(0) == (not card.low <= 0 <= card.high)
    assert ("within noise" in " ".join(card_lines(card, {}))) == (not card.excludes(0))


def test_each_figure_says_whether_it_can_be_told() -> None:
    def unsure() -> list[str]:
        return [line for line in card_lines(card, {}) if line.startswith("within noise: ")]

    card = Card.model_validate(FIRST)
    assert unsure() == []
    nothing = {"effect": 0.01, "low": -0.01, "high": 0.03}
    card = Card.model_validate({**FIRST, "equal_seconds": nothing})
    assert unsure() == ["within noise: +0.0100 [-0.0100, +0.0300] at equal seconds"]
    as_fast = {"effect": 1.01, "low": 0.98, "high": 1.04}
    card = Card.model_validate({**FIRST, "cost": {"speed": as_fast}})
    assert unsure() == ["within noise: 1.010 [0.980, 1.040] x tokens a second"]


@given(
    options=st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
    defaults=st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
)
def test_options_are_told_where_they_were_not_the_defaults(
    options: dict[str, int], defaults: dict[str, int]
) -> None:
    card = Card.model_validate({**FIRST, "options": options})
    other = {f"muon.{name}={value}" for name, value in set(options.items()) - set(defaults.items())}
    assert set(other_options(card, defaults)) == other
    told = [line for line in card_lines(card, defaults) if line.startswith("with ")]
    assert len(told) == bool(other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"effect": 1.0}, "the effect lies outside its interval"),
        ({"effect": "much"}, "effect: Input should be a valid number"),
        ({"plugin": "other"}, "the card of 'other'"),
        ({"scale": {"parameters": 0, "tokens": 1}}, "scale.parameters"),
        ({"date": "soon"}, "date: "),
        ({"cost": {"peak_bytes": -1}}, "cost.peak_bytes"),
    ],
)
def test_what_is_no_card_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    (tmp_path / "muon.json").write_text(json.dumps({**FIRST, **change}))
    with pytest.raises(BadCard, match=why) as refused:
        read_cards("muon", [tmp_path])
    assert str(tmp_path / "muon.json") in str(refused.value)


@given(data=st.binary(max_size=64))
def test_bytes_are_no_card(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("cards")
    (folder / "muon.json").write_bytes(data)
    with pytest.raises(BadCard):
        read_cards("muon", [folder])


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "muon.json").write_text(json.dumps(FIRST) + " " * (1 << 20))
    with pytest.raises(BadCard, match="too large"):
        read_cards("muon", [tmp_path])


def test_what_a_later_version_adds_is_passed_over() -> None:
    card = Card.model_validate({**FIRST, "colour": "blue"})
    assert card == Card.model_validate(FIRST)
    with pytest.raises(ValidationError):
        Card.model_validate({**FIRST, "low": float("nan")})


def test_too_few_pairs_make_no_card(tmp_path: Path) -> None:
    write_card(tmp_path, Card.model_validate({**FIRST, "seeds": [0, 1, 2, 3]}))
    assert read_cards("muon", [tmp_path]) == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the user's own card folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "minillm" / "cards"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plugins", "info", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_info_says_how_to_measure_what_was_not(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "from minillm_core import Plugin\n\nclass Mine(Plugin, api=1):\n    '''Mine.'''\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    how = "not measured yet: minillm ablate --plugins ./mine.py:Mine --seeds 5"
    assert how in shown(capsys, "./mine.py:Mine")
    document = json.loads(shown(capsys, "./mine.py:Mine", "--json"))
    assert document["cards"] == []


def test_info_shows_what_was_measured_here_and_what_is_shipped(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = "from minillm_core import Plugin\n\nclass Mine(Plugin, api=1):\n    '''Mine.'''\n"
    file = tmp_path / "mine.py"
    file.write_text(source)
    here, shipped = (
        Card.model_validate({**FIRST, "plugin": "mine", "hardware": name})
        for name in ("this machine", "\x1b[2Jtheirs")
    )
    assert card_sources(str(file)) == (home, tmp_path / "cards")
    write_card(home, here)
    write_card(tmp_path / "cards", shipped)
    text = shown(capsys, f"{file}:Mine")
    assert text.index("this machine") < text.index("theirs")
    assert "\x1b" not in text
    for part in ("-0.0400 [-0.0500, -0.0300] nats", "5 pairs", "0.980 [0.970, 0.990] x tokens"):
        assert part in text
    for part in ("1.010 x peak memory", "1,000,000 parameters (tiny)", "beside paired_heads"):
        assert part in text
    document = json.loads(shown(capsys, f"{file}:Mine", "--json"))
    assert [Card.model_validate(card) for card in document["cards"]] == [here, shipped]


def test_info_says_which_file_is_no_card(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir(parents=True)
    (home / "muon.json").write_text("{}")
    assert str(home / "muon.json") in shown(capsys, "muon").replace(" ", "")
