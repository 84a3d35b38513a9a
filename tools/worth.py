"""The measured effects of plugins, as columns of a table and the text below it.

All values come from the cards shipped beside the plugins' modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minillm_core.plugins.options import describe_option
from minillm_lab.card import FOLDER, Card, Interval, other_options, read_cards

__all__ = ["HEAD", "card_of", "cells", "changed", "measurement_notes"]

HEAD = ("loss, equal tokens", "loss, equal seconds", "speed")


def card_of(name: str, cls: type[Any]) -> Card | None:
    """Load the card of the most tokens beside a plugin's module; None: it has none."""
    cards = read_cards(name, [Path(inspect.getfile(cls)).parent / FOLDER])
    return max(cards, key=lambda card: card.scale.tokens, default=None)


def cells(card: Card | None) -> tuple[str, str, str]:
    """Format the columns of HEAD; an effect whose interval contains "no effect" is in brackets."""
    if card is None:
        return "", "", ""
    return (
        _figure(card, 0, "+.3f"),
        _figure(card.equal_seconds, 0, "+.3f"),
        _figure(card.cost.speed, 1, ".2f"),
    )


def changed(card: Card, cls: type[Any]) -> list[str]:
    """List the options that differ from their defaults, in command-line form."""
    described = (describe_option(*one) for one in cls.__pydantic_fields__.items())
    return other_options(card, {one["name"]: one.get("default") for one in described})


def measurement_notes(cards: Iterable[Card], options: Iterable[str]) -> str:
    """Describe the figures, the setting in which they were measured, and the other active plugins.

    Args:
        cards: the cards shown.
        options: options that differ from their defaults, in command-line form.
    """
    others = ", ".join(f"`{option}`" for option in options)
    runs: dict[tuple[object, ...], list[Card]] = {}
    for card in cards:
        context = (len(card.seeds), card.hardware, card.date, card.commit, card.scale.tokens)
        runs.setdefault(context, []).append(card)
    said = (
        "Loss: change in held-out loss, nats per token; negative is better. Speed: tokens per "
        "second, with the plugin over without. In brackets: within noise (the 95 % interval "
        "includes no difference)."
        + f" Options that differ from the defaults: {others}."
        * bool(others)
    )
    return "\n".join([said, *(_measured(run, len(runs) > 1) for run in runs.values())])


def _figure(one: Interval | None, none: float, form: str) -> str:
    if one is None:
        return ""
    text = format(one.effect, form)
    return text if one.excludes(none) else f"({text})"


def _measured(cards: list[Card], several: bool) -> str:
    first = cards[0]
    of = f" ({', '.join(f'`{card.plugin}`' for card in cards)})" if several else ""
    return (
        f"Measured{of} from {len(first.seeds)} paired seeds of {first.scale.tokens / 1e6:.1f} M "
        f"tokens at {_parameters(cards)}, preset `{first.scale.preset}` with changes, on one "
        f"{first.hardware}, {first.date}, commit {(first.commit or 'unknown')[:7]}; "
        f"{'; '.join(_companies(cards))}."
    )


def _parameters(cards: Iterable[Card]) -> str:
    millions = {round(card.scale.parameters / 1e6) for card in cards}
    return f"{' to '.join(map(str, sorted({min(millions), max(millions)})))} M parameters"


def _companies(cards: Iterable[Card]) -> Iterator[str]:
    """Describe the plugin set that each plugin was measured with, the most common set without names."""
    companies: dict[tuple[str, ...], list[str]] = {}
    for card in cards:
        companies.setdefault(card.company, []).append(card.plugin)
    usual = max(companies, key=lambda company: len(companies[company]))
    yield f"beside {_named(usual)}"
    for company, plugins in companies.items():
        if company != usual:
            yield f"{_named(plugins)} beside {_named(company)}"


def _named(plugins: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in plugins) or "the plain model"
