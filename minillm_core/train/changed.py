"""What differs between two lives of a run: settings, and plugins whose file was edited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minillm_core.config.schema import Config
from minillm_core.config.values import show
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.text import plain

DIGESTS = "digests."
"""Begins the paths of a plan's digests: of a plugin, by its name, or of a module."""


def changed(
    found: Mapping[str, Any], plugins: Iterable[LoadedPlugin]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Find the plugins whose code differs between two plans.

    Args:
        found: what differs, by path.
        plugins: those of the run.

    Returns:
        plugin -> where its code is, for people; and what differs besides.
    """
    owners = {name: one for one in plugins for name in (one.name, _package(one))}
    whose: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for path, pair in found.items():
        key = path.removeprefix(DIGESTS)
        owner = owners.get(key) or owners.get(key.partition(".")[0])
        if path.startswith(DIGESTS) and owner is not None:
            whose[owner.name] = owner.origin.offered_by or plain(
                owner.origin.source.partition(":")[0]
            )
        else:
            rest[path] = pair
    return whose, rest


def since(step: int | None, whose: Mapping[str, str]) -> list[str]:
    """Write one line for each plugin of :func:`changed`; without a step, since the run began."""
    begin = "the run began" if step is None else f"step {step:,}"
    return [
        f"the file of plugin {name} ({place}) has changed since {begin}"
        for name, place in sorted(whose.items())
    ]


def _package(one: LoadedPlugin) -> str:
    """Name the top package of the module that defines a plugin; of a single file, its own module."""
    return type(one.plugin).__module__.partition(".")[0]


_UNPLANNED = {"data.paths", "data.tokenizer"} | {
    f"train.{name}"
    for name in ("steps", "minutes", "dtype", "compile", "checkpointing", "spike", "rewind", "skip")
}
"""Settings that no plan depends on."""


def unlike(before: Config, now: Config) -> list[tuple[str, str]]:
    """List the settings that differ between a run and what is given now.

    Returns:
        For each ``train.lr = 0.001, the run has 0.003``, and ``train.lr=0.001`` for a new run.
    """
    then, given = (config.model_dump(mode="json") for config in (before, now))
    found: list[tuple[str, str]] = []

    def differs(key: str, value: Any, was: str) -> None:
        found.append((f"{key} = {show(value)}, the run has {was}", f"{key}={show(value)}"))

    if before.seed != now.seed:
        found.append((f"seed = {now.seed}, the run has {before.seed}", f"--seed {now.seed}"))
    rows, rows_then = (one.train.rows * one.train.accumulate for one in (now, before))
    for section in ("model", "train", "data"):
        for name, value in given[section].items():
            key, was = f"{section}.{name}", then[section][name]
            split = rows == rows_then and name in ("rows", "accumulate")
            if value != was and not split and key not in _UNPLANNED:
                differs(key, value, show(was))
    added = [name for name in now.plugins if name not in before.plugins]
    gone = [name for name in before.plugins if name not in now.plugins]
    if added or gone:
        signed = [*(f"+ {name}" for name in added), *(f"- {name}" for name in gone)]
        typed = ",".join([*added, *(f"-{name}" for name in gone)])
        found.append((f"--plugins: {', '.join(signed)}", f"--plugins {typed}"))
    for name, options in now.plugins.items():
        held = before.plugins.get(name, options)
        for option in sorted({*options, *held}):
            value, was = options.get(option), held.get(option)
            if value != was:
                differs(f"{name}.{option}", value, "its default" if was is None else show(was))
    return found
