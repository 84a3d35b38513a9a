"""What a planned run costs on this machine: time, readings of the data, disk; nothing is read or run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minillm_core.config.folders import cache_folder
from minillm_core.config.schema import Config
from minillm_core.data.sources import find
from minillm_core.errors import DataError
from minillm_core.plan import Plan
from minillm_core.plan.render import amount, sized
from minillm_core.plugins.cards import BadCard, card_sources, read_cards
from minillm_core.text import plain
from minillm_core.train.request import Prepared
from minillm_core.train.speeds import Expected, expected, known_tokens


@dataclass(frozen=True)
class Costs:
    """What is expected; None: it is not known."""

    speed: Expected | None
    seconds: float | None  # of training, without compilation and evaluations
    steps: int | None
    tokens: int | None  # to train on
    exact: bool  # whether that was counted by an earlier run
    epochs: float | None
    no_data: str  # why tokens are unknown
    checkpoint_bytes: int  # of one
    checkpoints: int  # that are kept
    cache_bytes: int | None  # of the data as tokens

    @property
    def disk_bytes(self) -> int:
        """At most, for checkpoints: a new one is complete before an old one goes."""
        return self.checkpoint_bytes * (self.checkpoints + 1) if self.checkpoints else 0

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.speed.tokens_per_second if self.speed else None,
            "basis": self.speed.basis if self.speed else None,
            "steps": self.steps,
            "train_tokens": self.tokens,
            "train_tokens_counted": self.exact,
            "epochs": self.epochs,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoints_kept": self.checkpoints,
            "disk_bytes": self.disk_bytes,
            "token_cache_bytes": self.cache_bytes,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Heading and words."""
        if self.speed is None:
            yield "time", "unknown here: minillm bench measures it, and so does a finished run"
        else:
            what = f"about {spoken(self.seconds or 0)} of training"
            per_second = f"{self.speed.tokens_per_second:,.0f}"
            yield "time", f"{what} at {per_second} tokens/s, {self.speed.basis}"
        yield "data", self._data()
        yield "disk", self._disk()

    def _data(self) -> str:
        if self.tokens is None:
            return f"unknown: {self.no_data}"
        about = "" if self.exact else "about "
        text = f"{about}{amount(self.tokens)} tokens to train on"
        if self.epochs is None:
            return text
        epochs = f"{self.epochs:.2g}" if self.epochs < 99 else f"{self.epochs:,.0f}"
        return f"{text}, {about}{epochs} epochs"

    def _disk(self) -> str:
        cache = f"; token cache about {sized(self.cache_bytes)}" if self.cache_bytes else ""
        if not self.checkpoints:
            return f"no checkpoints{cache}"
        return (
            f"{sized(self.checkpoint_bytes)} a checkpoint, {self.checkpoints} kept: "
            f"{sized(self.disk_bytes)} at most{cache}"
        )


def costs_of(prepared: Prepared, plan: Plan, dtype: str | None) -> Costs:
    """Estimate the costs of a plan; files are found, and not opened.

    Args:
        prepared: of the command line.
        plan: of it.
        dtype: of the compute; None: float32.
    """
    config, found = plan.config, prepared.detected
    cache = cache_folder()
    speed = None
    if found is not None:
        auto = config.train.dtype.replace("auto", "float32")
        ratio = _ratios(prepared)
        speed = expected(cache, plan, found.backend, found.device, dtype or auto, ratio)
    tokens, exact, why, whole = _tokens(config)
    steps, seconds = _length(plan, speed)
    keep = config.checkpoint.keep + bool(getattr(config.checkpoint, "best", False))
    return Costs(
        speed,
        seconds,
        steps,
        tokens,
        exact,
        epochs=steps * plan.tokens_per_step / tokens if steps and tokens else None,
        no_data=why,
        checkpoint_bytes=plan.estimate().checkpoint_bytes,
        checkpoints=0 if config.checkpoint.every == 0 else keep,
        cache_bytes=whole * (2 if config.model.vocab <= 65_536 else 4) if whole else None,
    )


def spoken(seconds: float) -> str:
    """A time that is known to two digits: 40 seconds, 3.2 minutes, 2.5 hours, 4 days."""
    for size, unit in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if (count := seconds / size) >= 1.5:
            return f"{count:.2g} {unit}" if count < 99 else f"{count:,.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 1.5 else "a second"


def _length(plan: Plan, speed: Expected | None) -> tuple[int | None, float | None]:
    """Steps and seconds of the run; a run has steps or minutes."""
    train = plan.config.train
    clock = None if train.minutes is None else 60 * train.minutes
    if speed is None:
        return train.steps, clock
    a_step = plan.tokens_per_step / speed.tokens_per_second
    steps = train.steps or max(1, int((clock or 0) / a_step))
    return steps, clock or steps * a_step


def _tokens(config: Config) -> tuple[int | None, bool, str, int | None]:
    """Tokens to train on, whether they were counted, why there are none, and those of all files."""
    try:
        sources = find(config.data.paths, lambda text: None)
    except DataError as error:
        return None, False, plain(f"{error.what}: {error.where}", 120), None
    each = bytes_a_token(config.model.vocab)
    read = [one for one in sources if one.format.read is not None]
    whole = int(sum(one.unpacked for one in read) / each)
    ids = sum(one.size for one in sources) - sum(one.size for one in read)
    share = 1.0 - config.data.val if isinstance(config.data.val, float) else 1.0
    known = known_tokens(cache_folder(), config)
    about = int((whole + ids // (2 if config.model.vocab <= 65_536 else 4)) * share)
    return known or about, known is not None, "", whole


def bytes_a_token(vocab: int) -> float:
    """Of a byte-level BPE trained on such text: 3.2 at 4,096 entries, 4.5 at 50,304."""
    return max(1.0, 0.35 * math.log2(vocab) - 1.0)


def _ratios(prepared: Prepared) -> Callable[[str, str], float | None]:
    """What a plugin does to the speed on some hardware, by its card from there."""
    files = {one.name: one.origin.file for one in prepared.plugins}

    def ratio(plugin: str, hardware: str) -> float | None:
        if plugin not in files:
            return None
        try:
            cards = read_cards(plugin, card_sources(files[plugin]))
        except BadCard:
            return None
        made = [card.cost.speed for card in cards if card.hardware == hardware]
        return next((speed.effect for speed in made if speed is not None), None)

    return ratio
