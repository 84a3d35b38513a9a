"""Technique cards: the measured worth of a plugin, at what scale, beside which other plugins.

A card is written by ``minillm ablate`` from its result and never typed. It is a JSON file,
``cards/NAME.json``: beside the file that defines the plugin where its authors ship one, and in the
user's own folder of cards (``data_folder``) for measurements made here. :func:`card_facts` and
:func:`worth` are what ``minillm plugins info`` shows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from minillm_core.commands import data_folder, plain
from minillm_core.studies import show_value

FOLDER = "cards"

PAIRS = 5
"""A card from fewer paired seeds is not shown."""

_MOST_BYTES = 1 << 20

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class BadCard(ValueError):
    """A file that is not a card, with the reason."""


class Part(BaseModel):
    """The base of a card's parts: typed, finite and frozen; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Interval(Part):
    """A mean difference of pairs, or ratio, with its 95 % interval."""

    effect: float
    low: float
    high: float

    @model_validator(mode="after")
    def _in_order(self) -> Interval:
        if not self.low <= self.effect <= self.high:
            raise ValueError("the effect lies outside its interval")
        return self

    def tells_from(self, value: float) -> bool:
        """Return whether ``value`` lies outside the interval: 0 of a difference, 1 of a ratio."""
        return self.low > value or self.high < value


class Scale(Part):
    """The size of the model and of its runs."""

    parameters: Count
    tokens: Count  # of each run
    preset: str | None = None


class Cost(Part):
    """Ratios of a run with the plugin to one without it."""

    speed: Interval | None = None  # of tokens a second
    peak_bytes: Positive | None = None


class Card(Interval):
    """The worth of one plugin: its effect on the loss at equal tokens; below 0 is better."""

    plugin: str
    version: str | None = None
    unit: str
    seeds: tuple[int, ...]  # of the pairs
    equal_seconds: Interval | None = None  # the effect on the loss in equal time
    scale: Scale
    company: tuple[str, ...] = ()  # plugins that were active in both runs of each pair
    options: dict[str, JsonValue] = {}  # all of the plugin's own
    hardware: str
    date: date
    commit: str | None = None  # of minillm's repository, where it ran from one
    cost: Cost = Cost()


def read_cards(plugin: str, folders: Iterable[Path]) -> list[Card]:
    """Read a plugin's cards, in the order of the folders; those of too few pairs are left out.

    Args:
        plugin: its name.
        folders: where ``NAME.json`` may lie.

    Raises:
        BadCard: a file is there and is no card, or another plugin's.
    """
    paths = (folder / f"{plugin}.json" for folder in folders)
    cards = []
    for path in filter(Path.is_file, paths):
        card = _read(path)
        if card.plugin != plugin:
            raise BadCard(f"{path}: the card of '{plain(card.plugin)}'")
        if len(set(card.seeds)) >= PAIRS:
            cards.append(card)
    return cards


def _read(path: Path) -> Card:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadCard(f"{path}: too large for a card")
        return Card.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadCard(f"{path}: {where + ': ' if where else ''}{plain(first['msg'])}") from error
    except OSError as error:
        raise BadCard(f"{path}: {error.strerror}") from error


def card_sources(file: str) -> tuple[Path, ...]:
    """List the folders that may hold a plugin's card: measurements made here, then those shipped.

    Args:
        file: the one that defines the plugin.
    """
    return data_folder() / FOLDER, Path(file).parent / FOLDER


def card_facts(plugin: str, file: str) -> dict[str, Any]:
    """Describe a plugin's worth as ``plugins info --json`` does.

    Args:
        plugin: its name.
        file: the one that defines it.

    Returns:
        JSON: ``cards``; where a file is no card there are none, and ``cards_refused`` says why.
    """
    try:
        found = read_cards(plugin, card_sources(file))
    except BadCard as error:
        return {"cards": [], "cards_refused": str(error)}
    return {"cards": [card.model_dump(mode="json") for card in found]}


def worth(shown: Mapping[str, Any]) -> list[str]:
    """Word what was measured of a plugin, or how to measure it.

    Args:
        shown: the document of ``plugins info``, :func:`card_facts` in it.
    """
    known = [Card.model_validate(card) for card in shown["cards"]]
    if not known:
        named = shown["name"] if shown["distribution"] else shown["source"]
        how = f"not measured yet: minillm ablate --plugins {named} --seeds {PAIRS}"
        if shown.get("slots_refused"):
            how += "; --with names what it needs beside it"
        return [plain(shown.get("cards_refused", how), limit=4096)]
    defaults = {one["name"]: one.get("default") for one in shown["options"]}
    return ["\n".join(map(plain, card_lines(card, defaults))) for card in known]


def card_lines(card: Card, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Show a card in a few lines.

    Args:
        card: the card.
        defaults: of the plugin's options, as JSON has them; only others are shown.
    """
    yield f"{_judged(card, signed, 0)} {card.unit}; {len(card.seeds)} pairs"
    if card.equal_seconds:
        yield f"{_judged(card.equal_seconds, signed, 0)} at equal seconds"
    if card.cost.speed:
        yield f"{_judged(card.cost.speed, '{:.3f}'.format, 1)} x tokens a second"
    if card.cost.peak_bytes:
        yield f"{card.cost.peak_bytes:.3f} x peak memory"
    preset = f" ({card.scale.preset})" if card.scale.preset else ""
    company = f"beside {', '.join(card.company)}" if card.company else "alone"
    yield f"{card.scale.parameters:,} parameters{preset}, {card.scale.tokens:,} tokens a run, {company}"
    if options := other_options(card, defaults):
        yield f"with {' '.join(options)}"
    commit = f"commit {card.commit[:12]}" if card.commit else ""
    code = " ".join(filter(None, (card.version, commit)))
    yield ", ".join(filter(None, (card.hardware, card.date.isoformat(), code)))


def other_options(card: Card, defaults: Mapping[str, Any]) -> list[str]:
    """List the options that were not at their defaults, as they are typed."""
    return [
        f"{card.plugin}.{name}={show_value(value)}"
        for name, value in card.options.items()
        if name not in defaults or defaults[name] != value
    ]


def _judged(found: Interval, form: Callable[[float], str], no_effect: float) -> str:
    """Show an effect with its interval, and whether that holds the value of no effect."""
    shown = interval(form, found.effect, found.low, found.high)
    return shown if found.tells_from(no_effect) else f"within noise: {shown}"


DECIMALS = 5
"""A difference that needs more is written with an exponent."""


def interval(
    form: Callable[[float], str], mean: float, low: float | None, high: float | None, unit: str = ""
) -> str:
    """Format ``mean unit [low, high]``; without the interval where a single pair gave none."""
    shown = f"{form(mean)}{unit}"
    return shown if low is None or high is None else f"{shown} [{form(low)}, {form(high)}]"


def signed(value: float) -> str:
    """Format a difference with its sign: four decimals, and two significant digits where those hold fewer."""
    if value == 0 or abs(value) >= 0.001:
        return f"{value or 0.0:+.4f}"  # 0 has no sign of its own
    short = f"{value:+.{DECIMALS}f}"
    return short if abs(value) >= 10 ** (1 - DECIMALS) else f"{value:+.1e}"


def card_folder() -> Path:
    """Return the user's folder of technique cards, which ``minillm plugins info`` reads first."""
    return data_folder() / FOLDER
