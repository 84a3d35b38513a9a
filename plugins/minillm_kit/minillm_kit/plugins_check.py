"""``minillm plugins check``: the chosen checks, their progress, and the tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from minillm_core import BackendError, ConfigError, MinillmError, inspection
from minillm_core.commands import AsJson, emit, nearest, plain, say

if TYPE_CHECKING:
    from minillm_kit.check import Check
    from minillm_kit.runner import Report, Result
    from minillm_kit.subject import Subject

EXAMPLES = """Examples:

minillm plugins check muon

minillm plugins check ./my_trick.py:MyTrick my_trick.scale=0.5 --backend torch

minillm plugins check muon --only slopes --only decodes

minillm plugins check muon --pairs all --json > report.json
"""

BOTH = "both"
SECONDS = 10
"""Seconds between two lines of progress, without a terminal."""

UNKNOWN_WIDTH = 100
"""Width of a table written to a file, where COLUMNS is not set."""

WORDS = {"passed": "ok", "failed": "FAILED", "not applicable": "n/a"}
STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow", "not applicable": "dim"}


class ChecksFailed(MinillmError):
    """A plugin that failed its checks; ``__cause__`` is the error of the first failure."""

    exit_code = 3


def check_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, or ./file.py:Class.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME.OPTION=VALUE", help="Options of the plugin.", show_default=False
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="both|torch|mlx", help="Frameworks to check it on.")
    ] = "both",
    pairs: Annotated[
        str, typer.Option(metavar="N|all", help="Number of other plugins to pair it with.")
    ] = "5",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Run only this check; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a plugin keeps the contract: numbers, decoding, resume, conflicts. Exit 3: it fails."""
    from minillm_kit.runner import chosen, run_checks

    words = [one.strip() for word in only or () for one in word.split(",")]
    checks = chosen([word for word in words if word])
    with redirect_stdout(sys.stderr):  # the plugin's own prints go where the progress does
        subject = subject_of(name, options or (), backend=backend, pairs=pairs)
        with _progress(subject.name, len(checks)) as (begin, finish):
            report = run_checks(subject, checks, begin, finish)
    if as_json:
        emit(report.data())
    else:
        render_report(report, Console())
    if report.failed:
        names = ", ".join(one.check for one in report.failed)
        error = ChecksFailed(f"plugin '{report.plugin}' failed: {names}")
        raise error from report.failed[0].outcome.error


def subject_of(spec: str, assignments: Sequence[str], *, backend: str, pairs: str) -> Subject:
    """Resolve the plugin to check; an installed but broken one is left to the checks.

    Raises:
        Refusal: there is no such plugin, option or backend; nothing was run.
    """
    from minillm_kit.subject import Subject

    known = (BOTH, *inspection.DEVICES)
    if backend not in known:
        close = nearest(backend, known)
        raise BackendError(
            f"there is no backend '{plain(backend)}' to check on",
            where=f"--backend {plain(backend)}",
            fix=f"did you mean {close}?" if close else f"one of {', '.join(known)}",
        )
    inspection.choose(inspection.probe(), "auto" if backend == BOTH else backend, "cpu")
    where = f"plugin {plain(spec)}"
    name = inspection.plugin_name(spec, where=where)
    if not _exists(spec, name):
        inspection.find_plugin(spec, where=where)  # raises Refusal
    options = _options(name, assignments)
    subject = Subject(spec, options, backend=backend, pairs=_pairs(pairs))
    try:
        absent = subject.absent
    except MinillmError:
        return subject  # the check `loads` reports the fault
    if backend in absent:
        able = ", ".join(subject.found.cls.manifest.backends)
        raise BackendError(
            absent[backend], where=f"--backend {backend}", fix=f"it runs on {able}: leave it out"
        )
    with suppress(inspection.PluginCodeError):  # its code raised; the check `loads` reports it
        _ = subject.loaded
    return subject


def _exists(spec: str, name: str) -> bool:
    """Return whether a plugin of this name exists, even if broken."""
    if spec == name:
        return bool(inspection.installed_plugins(only=name))
    file, _, class_name = spec.rpartition(":")
    if not Path(file).is_file():
        return False
    text = Path(file).read_text("utf-8", "replace")
    return re.search(rf"\bclass {class_name}\b", text) is not None


def _pairs(text: str) -> int | None:
    """Parse the number of other plugins; None: all.

    Raises:
        ConfigError: neither a number nor ``all``.
    """
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"--pairs takes a number or 'all', not '{plain(text)}'",
            where=f"--pairs {plain(text)}",
            fix="--pairs 5, --pairs all; 0: none",
        )
    return int(text)


def _options(name: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Parse ``NAME.option=value`` arguments: option -> its value."""
    options: dict[str, Any] = {}
    for key, setting in inspection.from_assignments(assignments).settings.items():
        owner, _, option = key.partition(".")
        if owner != name or not option:
            raise ConfigError(
                f"'{key}' is not an option of {name}: the model and its training are the kit's own",
                where=setting.where,
                fix=f"{name}.{option or owner}=...",
            )
        inspection.check_option(key, setting)
        options[option] = setting.value
    return options


@contextmanager
def _progress(
    name: str, total: int
) -> Iterator[tuple[Callable[[Check], None], Callable[[Result], None]]]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line every ten seconds.

    Yields:
        Functions to call before each check, and with each result: a failure is shown at once.
    """
    console, count, last = Console(stderr=True), 0, monotonic()
    if not console.is_terminal:

        def begin(check: Check) -> None:
            nonlocal count, last
            count += 1
            if monotonic() - last >= SECONDS:
                last = monotonic()
                say(f"{name}: {count} of {total}, {check.name}: {check.proves}")

        yield begin, lambda result: _show_failure(result, say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task, above = progress.add_task(name, total=total), progress.console

        def finish(result: Result) -> None:
            progress.advance(task)
            _show_failure(result, lambda line: above.print(line, markup=False, highlight=False))

        yield lambda check: progress.update(task, description=f"{name}: {check.name}"), finish


def _show_failure(result: Result, line: Callable[[str], None]) -> None:
    if result.outcome.verdict == "failed":
        first, _, _ = result.outcome.found.partition("\n")
        line(f"{result.check} failed: {first}")


def render_report(report: Report, console: Console) -> None:
    """Print the table, then each failure in full, the checks that were not run, and a summary."""
    from minillm_kit.runner import explained

    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=UNKNOWN_WIDTH)
    console.print(_table(report.results, wide=console.width >= 130))
    for one in report.failed:
        console.print()
        console.print(Text(explained(one)), soft_wrap=True)  # unwrapped, for copying
    console.print()
    reasons: dict[str, list[str]] = {}
    for one in report.results:
        if one.outcome.verdict == "not run":
            reasons.setdefault(one.outcome.found, []).append(one.check)
    for reason, names in reasons.items():
        console.print(Text(f"not run, {reason}: {', '.join(names)}"), soft_wrap=True)
    for backend, reason in report.absent.items():
        console.print(Text(f"not on {backend}: {reason}"), soft_wrap=True)
    verdicts = [one.outcome.verdict for one in report.results]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in STYLES if one in verdicts)
    on = f" on {' and '.join(report.backends)}" if report.backends else ""
    line = f"{report.plugin}{on}: {counts}, in {report.seconds:.0f} s"
    console.print(Text(line, "bold red" if report.failed else "green"), soft_wrap=True)


def _table(results: Sequence[Result], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("what holds", overflow="fold")
    if wide:
        table.add_column("found", overflow="fold")
    for one in results:
        verdict = one.outcome.verdict
        if verdict == "not run":
            continue
        found = Text(one.outcome.found.partition("\n")[0], "" if wide else "dim")
        cells = [Text(one.proves), found]
        table.add_row(
            Text(WORDS[verdict], STYLES[verdict]),
            one.check,
            f"{one.seconds:.1f}" if verdict != "not applicable" else "",
            *(cells if wide else [Text("\n").join(cells)]),
        )
    return table
