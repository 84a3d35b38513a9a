"""``minillm tune``: the division of a step, and the kernels, that are the fastest on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from minillm_core import Interrupted, MinillmError, Refusal
from minillm_core.commands import AsJson, Plugins, StudyOptions, cache_folder, counted, emit, say

if TYPE_CHECKING:
    from minillm_core import Plan
    from minillm_core.studies import RunRequest
    from minillm_lab.tune import Request

EXAMPLES = """Examples:

minillm tune

minillm tune --preset gpt2-124m --plugins muon --to muon.toml

minillm tune --preset 1b --memory 40GiB --steps 2

minillm tune --backend mlx --json > tuned.json
"""

_HOW = "Timing"

FIRST_PASS = (
    "Speeds of a first pass, one candidate after the other. The best one and your settings "
    "were then timed again in turns, which decides; those speeds may differ from the table."
)
"""The note below the table."""


def tune(
    *,
    plugins: Plugins = None,
    to: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="File to write all settings of the run to, for minillm train -c."
        ),
    ] = Path("tuned.toml"),
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that a step may take, such as 20GiB. Default: the device's.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps in each timed turn.", rich_help_panel=_HOW)
    ] = 3,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N", help="Turns per candidate; medians are compared.", rich_help_panel=_HOW
        ),
    ] = 3,
    run: StudyOptions,
    as_json: AsJson = False,
) -> None:
    """Find the micro-batch, checkpointing and kernels that train fastest on this machine.

    The tokens of a step stay the same (train.rows x train.accumulate), so every candidate trains the
    same model. Kernels of installed plugins that are not named are tried too; --plugins -NAME leaves
    NAME's out. Candidates that would not fit into memory, by the plan's estimate, are listed and not run.
    """
    from minillm_core.studies import bytes_of
    from minillm_lab.bench import refuse_no_time
    from minillm_lab.tune import Request

    request = Request(steps, repeats, None if memory is None else bytes_of(memory))
    refuse_no_time(steps, repeats)
    if to.exists():
        raise Refusal(f"{to} is there already", where=f"--to {to}", fix="--to with another name")
    if not to.absolute().parent.is_dir():
        raise Refusal(
            f"{to.parent} is not a folder",
            where=f"--to {to}",
            fix="name a file in a folder that exists",
        )
    if not os.access(to.absolute().parent, os.W_OK | os.X_OK):
        raise Refusal(
            f"nothing can be written to {to.parent}",
            where=f"--to {to}",
            fix="--to with a file in another folder",
        )
    show_tune(run.request(plugins=plugins), request, to, json=as_json)


def show_tune(asked: RunRequest, request: Request, to: Path, *, json: bool) -> None:
    """Tune; write the settings file; a table, or one JSON document, on stdout.

    Raises:
        Interrupted: a signal; the file has the best candidate so far.
    """
    from minillm_core import build_plan
    from minillm_core.studies import prepare, replace_file, settings_file
    from minillm_lab.tune import UNFINISHED, kernel_plugins
    from minillm_lab.tune import tune as run_tune

    words = [word.strip() for word in (asked.plugins or "").split(",")]
    excluded = {f"-{name}" for name in _excluded(asked)}
    asked = replace(asked, plugins=",".join(one for one in words if one not in excluded) or None)

    def planned(added: Collection[str]) -> Plan:
        names = filter(None, [asked.plugins, *added])
        again = prepare(replace(asked, plugins=",".join(names)), to_run=True)
        return build_plan(again.loaded, again.plugins)

    prepared = prepare(asked, to_run=True)
    assert prepared.detected is not None  # otherwise already refused
    plan = build_plan(prepared.loaded, prepared.plugins)
    known = {one.name for one in prepared.plugins} | {word.removeprefix("-") for word in words}
    result, best = run_tune(
        request,
        plan,
        prepared.detected,
        cache=cache_folder(),
        say=say,
        offered=[*kernel_plugins(known)],
        planned=planned,
    )
    command = f"minillm train -c {shlex.quote(str(to))}"
    if files := [one.origin.source for one in prepared.plugins if one.distribution is None]:
        command += f" --plugins {shlex.quote(','.join(files))}"
    measured = f"{result['device']}, {result['backend']}: {verdict(result)}"
    if not json:
        print_whole(Console(), render(result))
        say(verdict(result))
    remarks = () if result["finished"] else (UNFINISHED,)
    text = settings_file(best.config, (command, f"minillm tune, {measured}", *remarks))
    try:
        replace_file(to, text.encode())
    except OSError as error:
        raise MinillmError(
            f"the settings file could not be written: {error.strerror}",
            where=str(to),
            fix="make room there, or --to with a file in another folder",
        ) from error
    if json:
        emit(result | {"file": str(to)})
    if not result["finished"]:
        raise Interrupted(f"ended by a signal; {to} has the best candidate so far: {command}")
    if not json:
        say(f"{to} has it: {command}")


def _excluded(asked: RunRequest) -> set[str]:
    """Return the plugins of kernels that ``--plugins -NAME`` excludes and neither preset nor file names."""
    from minillm_core import load
    from minillm_core.studies import added, taken_away
    from minillm_lab.tune import kernel_plugins

    if not (names := taken_away(asked.plugins)):
        return names
    keys = ("preset", "backend", "device", "data.paths")
    loaded = load(
        asked.preset,
        plugins=[str(spec) for spec in added(asked.plugins).values()],
        settings={key: value for key in keys if (value := asked.given(key)) is not None},
        file=asked.file,
    )
    return (names - loaded.specs.keys()).intersection(kernel_plugins(()))


def render(result: Mapping[str, Any]) -> Table:
    """Build the table of candidates, with a mark at the chosen one."""
    from minillm_core.studies import sized
    from minillm_lab.tune import RECOMPUTED

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{result['preset']} on {result['device']}, {result['backend']}: "
        f"{result['tokens_per_step']:,} tokens a step; medians of "
        f"{counted(result['repeats'], 'turn')} of {counted(result['steps'], 'step')}; "
        f"{sized(result['memory_bytes'])} of memory",
        title_justify="left",
        caption=FIRST_PASS if result.get("timed_again") else None,
        caption_justify="left",
    )
    counted_peaks = any(one["peak_bytes"] for one in result["candidates"])
    known_mfu = any(one["mfu"] for one in result["candidates"])
    for head in ("rows", "kernels"):
        table.add_column(head, no_wrap=True)
    right = (
        "tokens/s",
        "of fastest",
        *["MFU"] * known_mfu,
        "est. memory",
        *["peak"] * counted_peaks,
    )
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    best = result["best"]
    fastest = max(one["tokens_per_second"] or 0.0 for one in result["candidates"])
    for one in result["candidates"]:
        speed = one["tokens_per_second"]
        chosen = all(one[key] == value for key, value in {"plugins": [], **best}.items())
        rows = f"{one['train.rows']} x {one['train.accumulate']}"
        cells = (
            rows + RECOMPUTED[one["train.checkpointing"]],
            ", ".join(
                [
                    *(f"with {name}" for name in one["plugins"]),
                    *([one["kernels"]] if one["kernels"] != "auto" else ()),
                ]
            ),
            f"{speed:,.0f}" if speed else one["reason"].partition(":")[0],
            f"{speed / fastest:.3f}" if speed else "",
            *([f"{one['mfu']:.1%}" if one["mfu"] else ""] * known_mfu),
            sized(one["predicted_bytes"]),
            *([sized(one["peak_bytes"]) if one["peak_bytes"] else ""] * counted_peaks),
            "chosen" if chosen else "",
        )
        table.add_row(*cells, style="bold" if chosen else None)
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table at its own width, even if the console is narrower, so that no name is broken."""
    wide = console.measure(table, options=console.options.update(width=1_000)).maximum
    console.width = max(wide, console.width)
    console.print(table)


def verdict(result: Mapping[str, Any]) -> str:
    """Describe the chosen candidate and its speed-up over the original settings."""
    finished = result.get("finished", True)
    if result["best"] == result["as_they_were"]:
        so_far = "" if finished else " so far"
        return f"the settings as they were are not clearly slower than any other{so_far}: they stay"
    before = result["as_they_were"]
    typed = " ".join(
        _typed(key, value) for key, value in result["best"].items() if value != before.get(key)
    )
    if not finished:
        return f"best so far: {typed}"
    gain = result["gain"]
    against = "those do not fit" if gain is None else f"{gain:.3f} x as fast, timed in turns"
    return f"best: {typed}; against the settings as they were: {against}"


def _typed(key: str, value: Any) -> str:
    """Format a setting as on the command line."""
    flags = {"kernels": str, "plugins": ",".join}
    return f"--{key} {flags[key](value)}" if key in flags else f"{key}={str(value).lower()}"
