"""How a run ends before its time: what is said, and which checkpoint there is to go on from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from minillm_core.checkpoint import layout
from minillm_core.errors import Interrupted, MinillmError, NonFinite, Stopped
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.position import Position
from minillm_core.train.signals import StopRequest

__all__ = [
    "exit_code",
    "interrupted",
    "kept",
    "not_finite",
    "resume_line",
    "stopped",
    "unsaved",
]


def exit_code(error: BaseException) -> int:
    """The code that the program will end with."""
    if isinstance(error, MinillmError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def kept(position: Position) -> str:
    """What there is to go on from."""
    last = position.saved
    return "no checkpoint was written" if last is None else f"the last good one: step {last}"


def stopped(stop: StopRequest, position: Position) -> MinillmError:
    """A signal ended it."""
    name = stop.signal.name if stop.signal else "a signal"
    if position.saved is None:
        return Interrupted(f"ended by {name} after step {position.step}; nothing was saved")
    return Stopped(
        f"ended by {name} after step {position.step}; "
        f"the checkpoint of step {position.saved} is there"
    )


def interrupted(
    out: Path | None, stop: StopRequest, plugins: Sequence[LoadedPlugin]
) -> MinillmError:
    """What an interrupt outside the loop, which tells by itself, amounts to."""
    name = stop.signal.name if stop.signal else "an interrupt"
    kept = layout.folders(out) if out is not None else []
    if out is None or not kept:
        return Interrupted(f"ended by {name}; nothing was saved")
    return Stopped(
        f"ended by {name}; the checkpoint of step {kept[0][0]} is there",
        where=str(out),
        fix=resume_line(out, plugins),
    )


def resume_line(out: Path, plugins: Iterable[LoadedPlugin]) -> str:
    """What to type to go on: single files must be named again, installed plugins need not."""
    files = [one.origin.source for one in plugins if one.distribution is None]
    named = ["--plugins", ",".join(files)] if files else []
    line = shlex.join(["minillm", "train", "--resume", "--out", str(out), *named])
    return f"{line} goes on from it"


def not_finite(what: str, position: Position) -> NonFinite:
    """Its numbers are none any more."""
    return NonFinite(what, where=kept(position))


def unsaved(reason: str, position: Position) -> MinillmError:
    """All steps were made, and the last of them could not be saved."""
    return MinillmError(
        "the run is over, and its last checkpoint could not be written: "
        + reason.partition("\n")[0],
        where=f"step {position.step}; {kept(position)}",
        fix="make room, and take it up with --resume",
    )
