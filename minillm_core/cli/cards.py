"""Where technique cards lie, and how one is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minillm_core.cli.cache import data_folder
from minillm_core.config.values import show
from minillm_core.measure.card import FOLDER, Card, Interval
from minillm_core.measure.told import interval, signed

__all__ = ["card_lines", "card_sources", "other_options"]


def card_sources(file: str) -> tuple[Path, ...]:
    """The folders in which the card of a plugin may lie: what was measured here, what is shipped.

    Args:
        file: the one that defines the plugin.
    """
    return data_folder() / FOLDER, Path(file).parent / FOLDER


def card_lines(card: Card, defaults: Mapping[str, Any]) -> Iterator[str]:
    """A card in a few lines.

    Args:
        card: the card.
        defaults: of the plugin's options, as JSON has them: those that were others are told.
    """
    yield f"{_interval(card, signed, plain=0)} {card.unit}; {len(card.seeds)} pairs"
    if card.equal_seconds:
        yield f"{_interval(card.equal_seconds, signed, plain=0)} at equal seconds"
    if card.cost.speed:
        yield f"{_interval(card.cost.speed, '{:.3f}'.format, plain=1)} x tokens a second"
    if card.cost.peak_bytes:
        yield f"{card.cost.peak_bytes:.3f} x peak memory"
    preset = f" ({card.scale.preset})" if card.scale.preset else ""
    company = f"beside {', '.join(card.company)}" if card.company else "alone"
    yield f"{card.scale.parameters:,} parameters{preset}, {card.scale.tokens:,} tokens a run, {company}"
    if options := other_options(card, defaults):
        yield f"with {' '.join(options)}"
    made = " ".join(
        filter(None, (card.version, f"commit {card.commit[:12]}" if card.commit else ""))
    )
    yield ", ".join(filter(None, (card.hardware, card.date.isoformat(), made)))


def other_options(card: Card, defaults: Mapping[str, Any]) -> list[str]:
    """The options that were not at their defaults, as they are typed."""
    return [
        f"{card.plugin}.{name}={show(value)}"
        for name, value in card.options.items()
        if name not in defaults or defaults[name] != value
    ]


def _interval(found: Interval, form: Callable[[float], str], *, plain: float) -> str:
    """An effect, and whether it can be told from ``plain``, that of a plugin that does nothing."""
    shown = interval(form, found.effect, found.low, found.high)
    return shown if found.tells_from(plain) else f"not distinguishable: {shown}"
