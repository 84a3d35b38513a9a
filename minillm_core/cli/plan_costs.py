"""What a planned run costs on this machine: time, readings of the data, disk; nothing is read or run."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def costs_of(
    prepared: Prepared, plan: Plan, dtype: str | None
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Estimate the costs of a plan; files are found, and not opened.

    Args:
        prepared: of the command line.
        plan: of it.
        dtype: of the compute; None: float32.

    Returns:
        The costs as JSON, with None for what is not known; and their headings and words.
    """
    config, found, speed = plan.config, prepared.detected, None
    if found is not None:
        dtype = dtype or config.train.dtype.replace("auto", "float32")
        ratio = _ratios(prepared)
        speed = expected(cache_folder(), plan, found.backend, found.device, dtype, ratio)
    tokens, exact, data, whole = _tokens(config)
    steps, seconds = _length(plan, speed)
    epochs = steps * plan.tokens_per_step / tokens if steps and tokens else None
    if epochs is not None:
        shown = f"{epochs:.2g}" if epochs < 99 else f"{epochs:,.0f}"
        data += f", {'' if exact else 'about '}{shown} epochs"
    time = "unknown here: minillm bench measures it, and so does a finished run"
    if speed is not None:
        per_second = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.basis}"
        time = f"about {spoken(seconds or 0)} of training at {per_second}"
    keep = config.checkpoint.keep + bool(getattr(config.checkpoint, "best", False))
    kept = 0 if config.checkpoint.every == 0 else keep
    one = plan.estimate().checkpoint_bytes
    at_most = one * (kept + 1) if kept else 0  # a new one is complete before an old one goes
    cached = whole * _id_bytes(config) if whole else None
    disk = "no checkpoints"
    if kept:
        disk = f"{sized(one)} a checkpoint, {kept} kept: {sized(at_most)} at most"
    if cached:
        disk += f"; token cache about {sized(cached)}"
    document = {
        "seconds": seconds,
        "tokens_per_second": speed.tokens_per_second if speed else None,
        "basis": speed.basis if speed else None,
        "steps": steps,
        "train_tokens": tokens,
        "train_tokens_counted": exact,
        "epochs": epochs,
        "checkpoint_bytes": one,
        "checkpoints_kept": kept,
        "disk_bytes": at_most,
        "token_cache_bytes": cached,
    }
    return document, (("time", time), ("data", data), ("disk", disk))


def spoken(seconds: float) -> str:
    """Write a time that is known to two digits: 40 seconds, 3.2 minutes, 2.5 hours, 4 days."""
    for size, unit in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if (count := seconds / size) >= 1.5:
            return f"{count:.2g} {unit}" if count < 99 else f"{count:,.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 1.5 else "a second"


def _length(plan: Plan, speed: Expected | None) -> tuple[int | None, float | None]:
    """Return the steps and seconds of the run, which has steps or minutes."""
    train = plan.config.train
    clock = None if train.minutes is None else 60 * train.minutes
    if speed is None:
        return train.steps, clock
    a_step = plan.tokens_per_step / speed.tokens_per_second
    steps = train.steps or max(1, int((clock or 0) / a_step))
    return steps, clock or steps * a_step


def _tokens(config: Config) -> tuple[int | None, bool, str, int | None]:
    """Count the tokens to train on; return them, whether an earlier run did, words, and all tokens."""
    try:
        sources = find(config.data.paths, lambda text: None)
    except DataError as error:
        return None, False, "unknown: " + plain(f"{error.what}: {error.where}", 120), None
    read = [one for one in sources if one.format.read is not None]
    whole = int(sum(one.unpacked for one in read) / bytes_a_token(config.model.vocab))
    ids = sum(one.size for one in sources) - sum(one.size for one in read)
    share = 1.0 - config.data.val if isinstance(config.data.val, float) else 1.0
    known = known_tokens(cache_folder(), config)
    tokens = known or int((whole + ids // _id_bytes(config)) * share)
    about = "about " if known is None else ""
    return tokens, known is not None, f"{about}{amount(tokens)} tokens to train on", whole


def _id_bytes(config: Config) -> int:
    return 2 if config.model.vocab <= 65_536 else 4


def bytes_a_token(vocab: int) -> float:
    """Estimate the bytes of a token of a byte-level BPE: 3.2 at 4,096 entries, 4.5 at 50,304."""
    return max(1.0, 0.35 * math.log2(vocab) - 1.0)


def _ratios(prepared: Prepared) -> Callable[[str, str], float | None]:
    """Look up what a plugin does to the speed on some hardware, in its card from there."""
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
