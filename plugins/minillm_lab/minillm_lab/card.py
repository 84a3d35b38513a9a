"""Technique cards: the measured effect of a plugin, with the scale and the other active plugins.

``minillm ablate`` writes cards from its result; they are not written by hand. A card is a JSON file,
``cards/NAME.json``: beside the file that defines the plugin if its authors ship one, and in the
user's card folder (``data_folder``) for measurements made on this machine. Older cards of other sizes
are beside it, ``cards/NAME@PARAMETERSxTOKENS.json``. ``minillm plugins info`` shows cards through
:func:`card_facts` and :func:`worth`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from operator import attrgetter
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
    """A file that is not a valid card, with the reason."""


class Part(BaseModel):
    """Base model of a card's parts: typed, finite and frozen; unknown fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Interval(Part):
    """A mean paired difference, or a ratio, with its 95 % confidence interval."""

    effect: float
    low: float
    high: float

    @model_validator(mode="after")
    def _in_order(self) -> Interval:
        if not self.low <= self.effect <= self.high:
            raise ValueError("the effect lies outside its interval")
        return self

    def excludes(self, value: float) -> bool:
        """Return whether the interval excludes ``value`` (no effect: 0 of a difference, 1 of a ratio)."""
        return self.low > value or self.high < value


class Scale(Part):
    """Sizes of the model and of its training runs."""

    parameters: Count
    tokens: Count  # of each run
    preset: str | None = None


class Cost(Part):
    """Ratios of a run with the plugin to one without it."""

    speed: Interval | None = None  # of tokens per second
    peak_bytes: Positive | None = None


class Card(Interval):
    """The measured effect of one plugin on the loss at equal tokens; below 0 is better."""

    plugin: str
    version: str | None = None
    unit: str
    seeds: tuple[int, ...]  # one pair of runs each
    equal_seconds: Interval | None = None  # the effect on the loss at equal wall-clock time
    scale: Scale
    company: tuple[str, ...] = ()  # plugins that were active in both runs of each pair
    options: dict[str, JsonValue] = {}  # all of the plugin's own
    hardware: str
    date: date
    commit: str | None = None  # of minillm's repository, if it ran from a checkout
    cost: Cost = Cost()

    @property
    def setting(self) -> tuple[object, ...]:
        """Everything that cards of several sizes have in common."""
        return self.company, self.options, self.unit


def read_cards(plugin: str, folders: Iterable[Path]) -> list[Card]:
    """Read a plugin's cards in the order of the folders; skip those of too few pairs.

    The newest card of a folder is first, the others are sorted by the sizes of model and training.

    Args:
        plugin: its name.
        folders: searched for ``NAME.json`` and ``NAME@*.json``.

    Raises:
        BadCard: a file is not a valid card, or is another plugin's.
    """
    cards, scale = [], attrgetter("scale.parameters", "scale.tokens")
    for folder in folders:
        newest, older = folder / f"{plugin}.json", folder.glob(f"{plugin}@*.json")
        cards += [_own(newest, plugin)] if newest.is_file() else []
        cards += sorted((_own(path, plugin) for path in older), key=scale)
    return [card for card in cards if len(set(card.seeds)) >= PAIRS]


def _own(path: Path, plugin: str) -> Card:
    card = read_card(path)
    if card.plugin != plugin:
        raise BadCard(f"{path}: the card of '{plain(card.plugin)}'")
    return card


def read_card(path: Path) -> Card:
    """Read a card.

    Raises:
        BadCard: the file is not a valid card.
    """
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
        file: the source file that defines the plugin.
    """
    return data_folder() / FOLDER, Path(file).parent / FOLDER


def card_facts(plugin: str, file: str) -> dict[str, Any]:
    """Return a plugin's measurements as JSON, for ``plugins info --json``.

    Args:
        plugin: its name.
        file: the source file that defines it.

    Returns:
        ``cards``, and what they predict for a larger model in ``transfer``; empty and None if a file is
        not a valid card, with the reason in ``cards_refused``.
    """
    try:
        found = read_cards(plugin, card_sources(file))
    except BadCard as error:
        return {"cards": [], "transfer": None, "cards_refused": str(error)}
    fitted = None
    if len(found) > 2:  # fewer cards cannot have the sizes of a line, whose fit imports NumPy
        from minillm_lab.transfer import transfer_of

        fitted = transfer_of(found)
    return {
        "cards": [card.model_dump(mode="json") for card in found],
        "transfer": fitted.model_dump(mode="json") if fitted else None,
    }


def worth(shown: Mapping[str, Any]) -> list[str]:
    """Return text lines on a plugin's measurements, or on how to measure it.

    Args:
        shown: the document of ``plugins info``, :func:`card_facts` in it.
    """
    known = [Card.model_validate(card) for card in shown["cards"]]
    if not known:
        named = shown["name"] if shown["distribution"] else shown["source"]
        how = f"not measured yet: minillm ablate --plugins {named} --seeds {PAIRS}"
        if shown.get("slots_refused"):
            how += "; add --with and the plugins that it requires"
        return [plain(shown.get("cards_refused", how), limit=4096)]
    defaults = {one["name"]: one.get("default") for one in shown["options"]}
    texts = [
        "\n".join(map(plain, card_lines(card, defaults, before)))
        for before, card in zip([None, *known[:-1]], known, strict=True)
    ]
    if shown.get("transfer"):
        from minillm_lab.transfer import Transfer

        texts.append(Transfer.model_validate(shown["transfer"]).words)
    return texts


def card_lines(
    card: Card, defaults: Mapping[str, Any], before: Card | None = None
) -> Iterator[str]:
    """Yield a card as a few lines of text.

    Args:
        card: the card.
        defaults: of the plugin's options, as JSON values; only values that differ are shown.
        before: the card shown before it, whose plugins and options are not repeated.
    """
    again = before is not None and before.setting == card.setting
    yield f"{_judged(card, signed, 0)} {card.unit}; {len(card.seeds)} pairs"
    if card.equal_seconds:
        yield f"{_judged(card.equal_seconds, signed, 0)} at equal seconds"
    if card.cost.speed:
        yield f"{_judged(card.cost.speed, '{:.3f}'.format, 1)} x tokens a second"
    if card.cost.peak_bytes:
        yield f"{card.cost.peak_bytes:.3f} x peak memory"
    preset = f" ({card.scale.preset})" if card.scale.preset else ""
    company = "the same otherwise" if again else beside(card.company)
    yield f"{card.scale.parameters:,} parameters{preset}, {card.scale.tokens:,} tokens a run, {company}"
    if not again and (options := other_options(card, defaults)):
        yield f"with {' '.join(options)}"
    commit = f"commit {card.commit[:12]}" if card.commit else ""
    code = " ".join(filter(None, (card.version, commit)))
    yield ", ".join(filter(None, (card.hardware, card.date.isoformat(), code)))


def beside(company: Sequence[str]) -> str:
    """Name the plugins that were active in both runs of each pair."""
    return f"beside {', '.join(company)}" if company else "alone"


def other_options(card: Card, defaults: Mapping[str, Any]) -> list[str]:
    """List the options that differ from their defaults, as command-line assignments."""
    return [
        f"{card.plugin}.{name}={show_value(value)}"
        for name, value in card.options.items()
        if name not in defaults or defaults[name] != value
    ]


def _judged(found: Interval, form: Callable[[float], str], no_effect: float) -> str:
    """Format an effect with its interval, marking an interval that contains "no effect"."""
    shown = interval(form, found.effect, found.low, found.high)
    return shown if found.excludes(no_effect) else f"within noise: {shown}"


DECIMALS = 5
"""Decimals of a difference; one that needs more is written with an exponent."""


def interval(
    form: Callable[[float], str], mean: float, low: float | None, high: float | None, unit: str = ""
) -> str:
    """Format ``mean unit [low, high]``; a single pair has no interval."""
    shown = f"{form(mean)}{unit}"
    return shown if low is None or high is None else f"{shown} [{form(low)}, {form(high)}]"


def signed(value: float) -> str:
    """Format a difference with its sign: four decimals, or at least two significant digits."""
    if value == 0 or abs(value) >= 0.001:
        return f"{value or 0.0:+.4f}"  # avoids -0
    short = f"{value:+.{DECIMALS}f}"
    return short if abs(value) >= 10 ** (1 - DECIMALS) else f"{value:+.1e}"


def card_folder() -> Path:
    """Return the user's folder of technique cards, which ``minillm plugins info`` reads first."""
    return data_folder() / FOLDER
