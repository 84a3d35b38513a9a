"""A plugin's effect at a larger size: a weighted line through its cards, with an interval that covers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core.cli.main import main
from minillm_lab.card import Card, read_cards
from minillm_lab.cards import write_card
from minillm_lab.transfer import BEYOND, transfer_of
from minillm_lab.worth import quantile

SIZES = (124_000_000, 354_000_000, 1_010_000_000)
PAIRS = 5


def card(size: int, ratio: float, effect: float, error: float = 1e-3, **more: Any) -> Card:
    half = quantile(PAIRS - 1) * error
    given = {
        "plugin": "trick",
        "effect": effect,
        "low": effect - half,
        "high": effect + half,
        "unit": "nats",
        "seeds": tuple(range(PAIRS)),
        "scale": {"parameters": size, "tokens": round(size * ratio)},
        "hardware": "one GPU",
        "date": "2026-11-01",
    }
    return Card.model_validate(given | more)


def effect(size: float, ratio: float) -> float:
    return -0.5 + 0.04 * math.log10(size) + 0.02 * math.log10(ratio)


def test_a_plane_is_continued_exactly() -> None:
    cards = [card(size, ratio, effect(size, ratio)) for size in SIZES for ratio in (1, 4)]
    found = transfer_of(cards)
    assert found is not None
    assert (found.cards, found.sizes) == (6, 3)
    assert found.parameters == BEYOND * SIZES[-1]
    assert found.tokens == pytest.approx(
        found.parameters, rel=1e-6
    )  # the first of the largest size
    assert found.effect == pytest.approx(effect(found.parameters, 1), abs=1e-7)
    assert found.slope.effect == pytest.approx(0.04, abs=1e-7)
    assert found.slope.excludes(0)
    assert "fades with size: +0.0400 [" in found.words
    assert "] per tenfold size with 10 times the tokens" in found.words


def test_a_line_is_that_of_numpy() -> None:
    effects, errors = (-0.05, -0.03, -0.04), (0.004, 0.001, 0.009)
    cards = [card(*one) for one in zip(SIZES, (1, 1, 1), effects, errors, strict=True)]
    found = transfer_of(cards)
    assert found is not None
    size = np.log10(SIZES)
    slope, start = np.polyfit(size, effects, 1, w=1 / np.array(errors))
    assert found.slope.effect == pytest.approx(slope, rel=1e-9)
    assert found.effect == pytest.approx(start + slope * math.log10(found.parameters), rel=1e-9)
    rest = (np.array(effects) - start - slope * size) / np.array(errors)
    assert found.misfit == pytest.approx(float(rest @ rest), rel=1e-9)
    design = np.stack([np.ones(3), size], axis=1) / np.array(errors)[:, None]
    inverse = np.linalg.inv(design.T @ design) * max(1.0, found.misfit)
    half = quantile(1 if found.misfit > 1 else 12) * math.sqrt(inverse[1, 1])
    assert found.slope.high - found.slope.effect == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize(
    ("rise", "said"), [(0, "at equal tokens"), (0.5, "with 3.16 times the tokens")]
)
def test_tokens_that_follow_from_the_size_have_no_slope_of_their_own(
    rise: float, said: str
) -> None:
    """As in four sizes of one budget: a slope for the tokens per parameter would share the size's."""
    sizes = [*SIZES, 2_050_000_000]
    tokens = [10**7 * (size / SIZES[0]) ** rise for size in sizes]
    cards = [
        card(size, many / size, -0.3 + 0.04 * math.log10(size))
        for size, many in zip(sizes, tokens, strict=True)
    ]
    found = transfer_of(cards)
    assert found is not None
    assert found.slope.effect == pytest.approx(0.04, abs=1e-6)
    assert found.tokens == pytest.approx(tokens[-1] * BEYOND**rise, rel=1e-4)
    assert found.effect == pytest.approx(-0.3 + 0.04 * math.log10(found.parameters), abs=1e-6)
    assert found.words.endswith(f"] per tenfold size {said}")


@pytest.mark.parametrize("beyond_pairs", [0.0, 0.004])
def test_the_interval_holds_the_truth(beyond_pairs: float) -> None:
    """Of 400 plugins whose cards have noise of their pairs, and scatter that these do not explain."""
    rng, error, held, widths = np.random.default_rng(0), 0.002, 0, []
    for _ in range(400):
        cards = [
            card(
                size,
                ratio,
                effect(size, ratio) + rng.normal(0, math.hypot(error, beyond_pairs)),
                error,
            )
            for size in SIZES
            for ratio in (1, 4)
        ]
        found = transfer_of(cards)
        assert found is not None
        held += found.low <= effect(found.parameters, 1) <= found.high
        widths.append(found.high - found.low)
    assert 0.9 < held / 400 <= 1
    assert np.median(widths) < 20 * math.hypot(error, beyond_pairs)  # and says something


def test_fewer_than_three_sizes_and_other_company_predict_nothing() -> None:
    two = [card(size, ratio, -0.1) for size in SIZES[:2] for ratio in (1, 4)]
    assert transfer_of(two) is None
    assert transfer_of([*two, card(round(SIZES[1] * 1.1), 1, -0.1)]) is None  # no third size
    assert transfer_of([*two, card(SIZES[2], 1, -0.1, company=("muon",))]) is None
    assert transfer_of([*two, card(SIZES[2], 1, -0.1)]) is not None


def test_the_setting_with_the_most_sizes_is_fitted() -> None:
    alone = [card(size, 1, -0.3) for size in SIZES[:2]]
    beside = [card(size, 1, effect(size, 1), company=("muon",)) for size in SIZES]
    found = transfer_of([*alone, *beside])
    assert found == transfer_of(beside)
    assert found is not None
    assert found.company == ("muon",)


def test_cards_of_other_sizes_are_kept_and_info_prints_what_they_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    source = "from minillm_core import Plugin\n\nclass Trick(Plugin, api=1):\n    '''A trick.'''\n"
    (tmp_path / "trick.py").write_text(source)
    cards = [card(size, 1, effect(size, 1)) for size in SIZES]
    for one in (*cards, cards[-1]):
        write_card(tmp_path / "cards", one)
    assert read_cards("trick", [tmp_path / "cards"])[0] == cards[-1]
    assert len([*(tmp_path / "cards").iterdir()]) == 3
    assert main(["plugins", "info", f"{tmp_path / 'trick.py'}:Trick"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "3.03 G parameters and 3.03 G tokens beside the same plugins, from 3 cards of 3 sizes"
        in shown
    )
    assert shown.count("a run, alone") == 1
    assert shown.count("a run, the same otherwise") == 2
    assert main(["plugins", "info", f"{tmp_path / 'trick.py'}:Trick", "--json"]) == 0
    transfer = json.loads(capsys.readouterr().out)["transfer"]
    assert transfer["effect"] == pytest.approx(effect(BEYOND * SIZES[-1], 1), abs=1e-6)
