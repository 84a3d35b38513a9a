"""A search that is resumed: its folder, its space, and what of it differs from the command's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minillm_core import Refusal
from minillm_core.commands import few
from minillm_lab.members import RUNS, refuse_other
from minillm_lab.search_page import RESULT
from minillm_lab.space import Prospect, Space


def begun_with(
    space: Space,
    earlier: Mapping[str, Any],
    *,
    plugins: bool,
    values: bool,
    removed: Collection[str] = (),
) -> Space:
    """Return the space of the search that is resumed, as far as the command does not name another one.

    The plugins of a space depend on what is installed, and their order on technique cards; both may have changed.

    Args:
        space: as a search that begins now would have it.
        earlier: the search.json that is resumed.
        plugins: whether the command names the plugins. Then only their order is the earlier one.
        values: whether the command has a space file, whose values are used.
        removed: plugins that the command removes.
    """
    if not (asked := earlier.get("asked", {}).get("space")):
        return space
    kept = Space.of(asked)
    known = {
        name: Prospect(gain, tuple(company)) for name, gain, company in earlier.get("prospects", ())
    }
    others = {*kept.plugins} != {*space.plugins} if plugins else {*kept.plugins} & {*removed}
    found = space if values else replace(kept, plugins=space.plugins)
    return replace(
        found,
        plugins=space.plugins if others else kept.plugins,
        prospects=known if "prospects" in earlier else space.prospects,
    )


def refuse_folder(out: Path, *, resume: bool) -> None:
    """Check that a search can begin in a folder, or that the one in it is to be resumed.

    Raises:
        Refusal: it cannot.
    """
    refuse_other(out, RESULT)
    there = (out / RESULT).exists()
    if not there and (out / RUNS).exists():  # a search writes its result before its first run
        raise Refusal(
            f"{out} holds runs, and no search that made them",
            where=f"{out / RUNS}; there is no {RESULT}",
            fix="--out with another folder" + ", without --resume" * resume,
        )
    if there and not resume:
        raise Refusal(
            f"{out} holds a search already",
            where=str(out / RESULT),
            fix="the same command with --resume continues it; --out with another folder begins "
            "another",
        )
    if resume and not there:
        raise Refusal(
            f"{out} holds no search to resume",
            where=f"--out {out}; there is no {RESULT}",
            fix="the same without --resume",
        )


def refuse_changed(out: Path, earlier: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Check that a resumed search has the settings with which it began.

    Args:
        out: its folder.
        earlier: the search.json in it; empty without one.
        asked: the settings of this command, as in search.json.

    Raises:
        Refusal: one differs.
    """
    kept, now = earlier.get("asked"), json.loads(json.dumps(asked))
    if kept is None:
        return
    for key, value in now.items():
        if kept.get(key) != value:
            raise Refusal(
                f"{out} holds another search: its {_called(key)} differs from this one's",
                where=f"{out / RESULT}: {_apart(key, kept.get(key), value)}",
                fix="the command that began it, or --out with another folder",
            )


def _called(key: str) -> str:
    lengths = dict.fromkeys(("minutes", "tokens"), "length of runs")
    return {"plan_hash": "plan", "rows": "batch", **lengths}.get(key, key)


def _apart(key: str, was: Any, now: Any) -> str:
    """Describe how an entry of a search differs from that of another: of a table, its first entry that does."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        inner = next(one for one in (*now, *was) if was.get(one) != now.get(one))
        return _apart(f"{key}, {inner}", was.get(inner), now.get(inner))
    if isinstance(was, list) and isinstance(now, list):
        gone, new = (
            [one for one in some if one not in others] for some, others in ((was, now), (now, was))
        )
        if gone or new:
            words = (
                f"{few([*map(str, some)])} only {place}"
                for some, place in ((gone, "there"), (new, "now"))
                if some
            )
            return f"{key}: {'; '.join(words)}"
    return f"{key} {_short(was)}; now {_short(now)}"


def _short(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
