"""Technique cards from an ablation's result: one per plugin that has enough pairs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import minillm_core
from minillm_core.commands import few
from minillm_core.studies import replace_file
from minillm_lab.ablation_page import at_equal_tokens
from minillm_lab.card import PAIRS, BadCard, Card, Cost, Interval, Scale, read_card

Json = Mapping[str, Any]


def cards_of(result: Json) -> tuple[list[Card], str | None]:
    """Build the technique cards of a finished ablation.

    Args:
        result: as in ablation.json.

    Returns:
        The cards; and one line naming the plugins without a card and the reason, or None.
    """
    enough = {
        name: one
        for name, one in result["plugins"].items()
        if one["effect"] is not None
        and one["pairs"] >= PAIRS
        and not one.get("together")
        and "begins_with" not in result
    }
    without = [name for name in result["plugins"] if name not in enough]
    takes = f"one takes {PAIRS} pairs"
    if any(result["plugins"][name].get("together") for name in without):
        takes += ", and a plugin that is left out by itself"
    if "begins_with" in result:
        takes += ", and runs that begin with new weights"
    why = f"no technique card for {few(without)}: {takes}" if without else None
    return [_card(name, one, result) for name, one in enough.items()], why


def commit() -> str | None:
    """Return the commit of minillm's repository; None outside a checkout."""
    root = Path(minillm_core.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):  # git is missing, or this is not a repository
        return None
    return found.stdout.strip() or None


def _card(name: str, one: Json, result: Json) -> Card:
    having, company = result["variants"][one["with"]], result["variants"][one["without"]]
    equal = at_equal_tokens(result)
    runs = [run for run in equal if run["variant"] == one["with"]]
    others = {run["seed"] for run in equal if run["variant"] == one["without"]}
    seeds = tuple(sorted(run["seed"] for run in runs if run["seed"] in others))
    peak = one["peak_bytes"]
    return Card(
        plugin=name,
        version=having["versions"].get(name),
        effect=one["effect"],
        low=one["low"],
        high=one["high"],
        unit=one["unit"],
        seeds=seeds,
        equal_seconds=_interval(one["equal_seconds"]),
        scale=Scale(
            parameters=having["parameters"],
            tokens=max(run["tokens"] for run in runs),
            preset=result["preset"],
        ),
        company=tuple(company["plugins"]),
        options=having["options"].get(name, {}),
        hardware=_hardware(result),
        date=result["date"],
        commit=result["commit"],
        cost=Cost(
            speed=_interval(one["speed"]),
            peak_bytes=peak["with"] / peak["without"] if peak["with"] and peak["without"] else None,
        ),
    )


def _interval(effect: Json | None) -> Interval | None:
    if effect is None or effect["low"] is None:
        return None
    return Interval(effect=effect["effect"], low=effect["low"], high=effect["high"])


def _hardware(result: Json) -> str:
    machine = result["hardware"]
    cores = f", {machine['cores']} cores" if machine["device"] == machine["machine"] else ""
    return f"{result['device']}{cores}, {result['backend']} in {result['dtype']}"


def write_card(folder: Path, card: Card) -> Path:
    """Write ``NAME.json`` into a folder.

    An older card of another size of model or run is kept as ``NAME@PARAMETERSxTOKENS.json``; one of the same
    size is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card.plugin}.json"
    with suppress(BadCard, FileNotFoundError):
        path.rename(folder / _sized(read_card(path)))
    (folder / _sized(card)).unlink(missing_ok=True)
    replace_file(path, card.model_dump_json(indent=1).encode() + b"\n")
    return path


def _sized(card: Card) -> str:
    """Return the file name of an older card."""
    return f"{card.plugin}@{card.scale.parameters}x{card.scale.tokens}.json"
