"""``minillm plugins check``: what is asked for, the progress while it runs, and the tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from minillm_core.cli.console import say
from minillm_core.errors import BackendError, ConfigError, MinillmError, PluginCodeError
from minillm_core.text import nearest, plain

if TYPE_CHECKING:
    from rich.console import Console

    from minillm_core.testing.check import Check
    from minillm_core.testing.runner import Report, Result
    from minillm_core.testing.subject import Subject

__all__ = ["ChecksFailed", "check", "pairs_of", "render_report", "subject_of"]

BOTH = "both"
SECONDS = 10
UNKNOWN_WIDTH = 100
"""Columns of a table that is read from a file, where COLUMNS does not say."""

WORDS = {"passed": "ok", "failed": "FAILED", "not applicable": "n/a"}
STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow", "not applicable": "dim"}


class ChecksFailed(MinillmError):
    """The plugin was checked, and is not right; ``__cause__`` is what the first failure raised."""

    exit_code = 3

    @classmethod
    def of(cls, report: Report) -> ChecksFailed:
        """The error of a report with failures, to be raised once that is shown."""
        names = ", ".join(one.check for one in report.failed)
        error = cls(f"plugin '{report.plugin}' failed: {names}")
        error.__cause__ = report.failed[0].outcome.error
        return error


def check(
    spec: str, assignments: Sequence[str], *, backend: str, pairs: str, only: Sequence[str]
) -> Report:
    """Run the checks; what the plugin prints goes to stderr, as the progress does.

    Raises:
        Refusal: there is no such plugin, option, backend or check; nothing was run.
    """
    from minillm_core.testing.runner import chosen, run_checks

    checks = chosen([name.strip() for word in only for name in word.split(",") if name.strip()])
    with redirect_stdout(sys.stderr):
        subject = subject_of(spec, assignments, backend=backend, pairs=pairs)
        with _progress(subject.name, len(checks)) as (tell, found):
            return run_checks(subject, checks, tell, found)


def subject_of(spec: str, assignments: Sequence[str], *, backend: str, pairs: str) -> Subject:
    """What is to be checked; a plugin that is there and broken is for the checks to fail.

    Raises:
        Refusal: there is no such plugin, option or backend.
    """
    from minillm_core.backends.detect import DEVICES, choose, probe
    from minillm_core.config.selection import name_of
    from minillm_core.plugins.find import find
    from minillm_core.testing.subject import Subject

    if backend not in (BOTH, *DEVICES):
        close = nearest(backend, (BOTH, *DEVICES))
        raise BackendError(
            f"there is no backend '{plain(backend)}' to check on",
            where=f"--backend {plain(backend)}",
            fix=f"did you mean {close}?" if close else f"one of {BOTH}, {', '.join(DEVICES)}",
        )
    choose(probe(), "auto" if backend == BOTH else backend, "cpu")
    name = name_of(spec, where=f"plugin {plain(spec)}")
    if not _is_there(spec, name):
        find(spec)  # refuses it
    options = _options(name, assignments)
    subject = Subject(spec, options, backend=backend, pairs=pairs_of(pairs))
    try:
        absent = subject.absent
    except MinillmError:
        return subject  # broken: the check `loads` says how
    if backend in absent:
        able = ", ".join(subject.found.cls.manifest.backends)
        raise BackendError(
            absent[backend], where=f"--backend {backend}", fix=f"it runs on {able}: leave it out"
        )
    with suppress(PluginCodeError):  # its own code raised: the check `loads` says where
        _ = subject.loaded
    return subject


def _is_there(spec: str, name: str) -> bool:
    """Whether there is something of this name to check, however broken."""
    from minillm_core.plugins.discover import installed_plugins

    if spec == name:
        return bool(installed_plugins(only=name))
    file, _, class_name = spec.rpartition(":")
    if not Path(file).is_file():
        return False
    return (
        re.search(rf"\bclass {class_name}\b", Path(file).read_text("utf-8", "replace")) is not None
    )


def pairs_of(text: str) -> int | None:
    """How many other plugins; None: all.

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
    """Option -> its value, of ``NAME.option=value`` arguments."""
    from minillm_core.config.sources import from_assignments
    from minillm_core.config.values import check_option

    options: dict[str, Any] = {}
    for key, setting in from_assignments(assignments).settings.items():
        owner, _, option = key.partition(".")
        if owner != name or not option:
            raise ConfigError(
                f"'{key}' is no option of {name}: the model and its training are the kit's own",
                where=setting.where,
                fix=f"{name}.{option or owner}=...",
            )
        check_option(key, setting)
        options[option] = setting.value
    return options


@contextmanager
def _progress(name: str, total: int) -> Iterator[tuple[Any, Any]]:
    """Yields what is told of each check, and of each result: a failure is said at once.

    On a terminal one line moves; elsewhere there is a line every ten seconds.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name, total), lambda one: _say_failed(one, say)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)

        def found(one: Result) -> None:
            progress.advance(task)
            above = progress.console
            _say_failed(one, lambda line: above.print(line, markup=False, highlight=False))

        yield lambda one: progress.update(task, description=f"{name}: {one.name}"), found


def _lines(name: str, total: int) -> Callable[[Check], None]:
    """Says which check is begun, at most every ten seconds."""
    count, last = 0, monotonic()

    def tell(one: Check) -> None:
        nonlocal count, last
        count += 1
        if monotonic() - last >= SECONDS:
            last = monotonic()
            say(f"{name}: {count} of {total}, {one.name}: {one.proves}")

    return tell


def _say_failed(one: Result, line: Callable[[str], None]) -> None:
    if one.outcome.verdict == "failed":
        first, _, _ = one.outcome.found.partition("\n")
        line(f"{one.check} failed: {first}")


def render_report(report: Report, console: Console) -> None:
    """Print the table, then each failure whole, then a line for all."""
    from rich.console import Console
    from rich.text import Text

    from minillm_core.testing.runner import explained

    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=UNKNOWN_WIDTH)
    console.print(_table(report.results, wide=console.width >= 130))
    for one in report.failed:
        console.print()
        console.print(Text(explained(one)), soft_wrap=True)  # whole lines: one of them is copied
    console.print()
    notes = [f"not on {backend}: {reason}" for backend, reason in report.absent.items()]
    for line in (*passed_over(report.results), *notes):
        console.print(Text(line), soft_wrap=True)
    style = "bold red" if report.failed else "green"
    console.print(Text(summary(report), style), soft_wrap=True)


def _table(results: Sequence[Result], *, wide: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

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
        seconds = f"{one.seconds:.1f}" if verdict != "not applicable" else ""
        table.add_row(
            Text(WORDS[verdict], STYLES[verdict]),
            one.check,
            seconds,
            *(cells if wide else [Text("\n").join(cells)]),
        )
    return table


def passed_over(results: Sequence[Result]) -> Iterator[str]:
    """A line for each check that others build on: those were not run."""
    reasons: dict[str, list[str]] = {}
    for one in results:
        if one.outcome.verdict == "not run":
            reasons.setdefault(one.outcome.found, []).append(one.check)
    for reason, names in reasons.items():
        yield f"not run, {reason}: {', '.join(names)}"


def summary(report: Report) -> str:
    """How many of each verdict, on what, in how long."""
    verdicts = [one.outcome.verdict for one in report.results]
    counts = [f"{verdicts.count(one)} {one}" for one in STYLES if one in verdicts]
    on = f" on {' and '.join(report.backends)}" if report.backends else ""
    return f"{report.plugin}{on}: {', '.join(counts)}, in {report.seconds:.0f} s"
