"""A technique's card: what a plugin was measured to be worth, at what scale, in which company.

A card is written by ``minillm ablate`` from its result and never typed. It is a JSON file,
``cards/NAME.json``: beside the file that defines the plugin where its authors ship one, and in the
user's own folder of cards (``minillm_core.cli.cache.data_folder``), where what was measured here is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from minillm_core.checkpoint import disk
from minillm_core.text import plain

__all__ = [
    "FOLDER",
    "PAIRS",
    "BadCard",
    "Card",
    "Cost",
    "Interval",
    "Scale",
    "read_cards",
    "write_card",
]

FOLDER = "cards"

PAIRS = 5
"""A card from fewer paired seeds is not shown."""

_MOST_BYTES = 1 << 20

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class BadCard(ValueError):
    """A file that is no card, in a few words."""


class Part(BaseModel):
    """Base: values are of their type, finite, and fixed; what a later version adds is passed over."""

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
        """Whether that lies outside the interval: 0 of a difference, 1 of a ratio."""
        return self.low > value or self.high < value


class Scale(Part):
    """What was trained."""

    parameters: Count
    tokens: Count  # of each run
    preset: str | None = None


class Cost(Part):
    """With the plugin over without it."""

    speed: Interval | None = None  # of tokens a second
    peak_bytes: Positive | None = None


class Card(Interval):
    """What one plugin is worth: the effect on the loss at equal tokens, below 0 is better."""

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
    """The plugin's cards, in the order of the folders; those of too few pairs are left out.

    Args:
        plugin: its name.
        folders: where ``NAME.json`` may lie.

    Raises:
        BadCard: a file is there and is no card, or another plugin's.
    """
    cards = []
    for folder in folders:
        path = folder / f"{plugin}.json"
        if not path.is_file():
            continue
        card = _read(path)
        if card.plugin != plugin:
            raise BadCard(f"{path}: the card of '{plain(card.plugin)}'")
        if len(set(card.seeds)) >= PAIRS:
            cards.append(card)
    return cards


def write_card(folder: Path, card: Card) -> Path:
    """Write ``NAME.json`` into a folder, in the place of an older one.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card.plugin}.json"
    disk.replace(path, card.model_dump_json(indent=1).encode() + b"\n")
    return path


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
