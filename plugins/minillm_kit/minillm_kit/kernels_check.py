"""``minillm kernels check``: the chosen kernels, their progress, and the table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core import BackendError, MinillmError, Refusal
from minillm_core.commands import AsJson, counted, display, emit, nearest, plain, say

if TYPE_CHECKING:
    from minillm_kit.kernels.check import Report, Row, Target
    from minillm_kit.kernels.examples import Case
    from minillm_kit.kernels.offers import Offer

EXAMPLES = """Examples:

minillm kernels check

minillm kernels check attention --dtype bfloat16

minillm kernels check swiglu --plugins ./mine.py:Mine --kernel mine --backend torch

minillm kernels check --device cuda --json > kernels.json
"""

UNKNOWN_WIDTH = 120
"""Width of a table written to a file, where COLUMNS is not set."""

SHOWN = 12
"""Maximum number of failures printed in full; JSON has all."""


class KernelsFailed(MinillmError):
    """Kernels that failed their check."""

    exit_code = 3


Ops = Annotated[
    list[str] | None,
    typer.Argument(metavar="OP", help="Only these ops. Default: all.", show_default=False),
]
Kernel = Annotated[str | None, typer.Option(metavar="NAME", help="Only the kernels of this name.")]
FromFiles = Annotated[
    str | None,
    typer.Option(
        "--plugins",
        metavar="./FILE.py:CLASS",
        help="Plugins whose kernels to add to those of all installed ones.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="torch|mlx", help="Only this framework. Default: all that are installed."),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, cuda:1 or mps; gpu for mlx. Default: the best of each framework.",
    ),
]


def check_command(
    ops: Ops = None,
    kernel: Kernel = None,
    backend: Backend = None,
    device: Device = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="float32, bfloat16 or float16; may be repeated. Default: all."
        ),
    ] = None,
    plugins: FromFiles = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random inputs.", min=0)] = 11,
    case: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Only this case of each op; may be repeated.", min=0),
    ] = None,
    large: Annotated[
        bool,
        typer.Option(
            "--large",
            metavar="",
            help="Also check cases of more than 2^31 logits: tens of GiB, and minutes on a CPU.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check kernels against NumPy in float64: outputs, gradients, memory, repetition. Exit 3: one fails.

    Each kernel that this machine can run is called with unusual sizes and every form that it accepts.
    A kernel that declares a larger error than its op's contract allows (fp8) may exceed the tolerance.
    """
    from minillm_kit.kernels.check import plan_check, run_check
    from minillm_kit.kernels.problem import DTYPES

    for name in dtype or ():
        refuse_dtype(name, "checked")
    with redirect_stdout(sys.stderr), display(say) as shown:  # a plugin's prints go there too
        with shown.phase("collecting kernels, and importing the frameworks"):
            targets = targets_of(
                ops or (), kernel=kernel, backend=backend, device=device, plugins=plugins
            )
        own = _numbered(case, targets)

        def chosen(one: Case) -> bool:
            return one.effort != "large" or large if own is None else one in own

        rows = plan_check(targets, list(dict.fromkeys(dtype or DTYPES)), chosen)
        _refuse_nothing(rows, kernel)
        total = sum(len(row.cases) for row in rows)
        served = [row.target for row in rows if row.cases]
        on = dict.fromkeys(f"{one.calls.backend} {one.calls.device}" for one in served)
        kernels = counted(len({one.offer.called for one in served}), "kernel")
        shown.say(f"checking {kernels} on {', '.join(on)}: {counted(total, 'case')}, seed {seed}")

        def tell(row: Row, done: int, total: int) -> None:
            called = f"{row.target.offer.called} on {row.target.calls.backend}"
            shown.progress(f"checking {called} in {row.dtype}", done, total, "cases")

        def found(row: Row) -> None:
            shown.say(f"{_called(row)} failed: {row.failures[0][1].found}")

        report = run_check(rows, seed=seed, tell=tell, found=found)
    if as_json:
        emit(report.data())
    else:
        render(report, Console())
    if failed := report.failed:
        names = ", ".join(dict.fromkeys(_called(row) for row in failed))
        raise KernelsFailed(f"{counted(len(failed), 'row')} of the table failed: {names}")


def refuse_dtype(name: str, done: str) -> None:
    """Check that a dtype is a compute dtype; ``done`` is the verb of the error message.

    Raises:
        Refusal: it is not.
    """
    from minillm_kit.kernels.problem import DTYPES

    if name not in DTYPES:
        close = nearest(name, DTYPES)
        raise Refusal(
            f"kernels are not {done} in '{plain(name)}'",
            where=f"--dtype {plain(name)}",
            fix=f"did you mean {close}?" if close else f"one of {', '.join(DTYPES)}",
        )


def targets_of(
    ops: Sequence[str],
    *,
    kernel: str | None,
    backend: str | None,
    device: str | None,
    plugins: str | None,
) -> list[Target]:
    """Find the kernels, on each available backend.

    Raises:
        Refusal: there is no such op, kernel, backend, device or plugin.
    """
    from minillm_kit.kernels.calls import calls_on
    from minillm_kit.kernels.check import Target
    from minillm_kit.kernels.offers import offers, places

    plugins = plugins or ""
    named = _named(plugins)
    found = offers(named)
    for spec in named:
        if not any(one.plugin == spec for one in found.kernels):
            raise Refusal(
                f"plugin '{plain(spec)}' brings no kernel",
                where=f"--plugins {plain(plugins)}",
                fix="leave it out; kernels list takes the plugins of a run",
            )
    chosen: tuple[Offer, ...] = found.of(ops, kernel)
    for name, reason in found.broken.items():
        say(f"note: the kernels of plugin '{name}' are left out: {reason}")
    targets = []
    for place in places(backend, device):
        calls = calls_on(place.backend, place.device)
        targets += [Target(one, calls) for one in chosen if place.backend in one.candidate.backends]
    if not targets:
        backends = dict.fromkeys(name for one in chosen for name in one.candidate.backends)
        raise BackendError(
            f"no kernel of {', '.join(dict.fromkeys(one.called for one in chosen))} is for "
            f"{backend or 'a backend that is installed'}",
            where=f"--backend {backend}" if backend else None,
            fix=f"--backend {' or '.join(backends)}",
        )
    return targets


def _named(plugins: str) -> list[str]:
    """Split ``--plugins``; each plugin comes once.

    Raises:
        Refusal: one is to be removed.
    """
    named = dict.fromkeys(one.strip() for one in plugins.split(",") if one.strip())
    for one in named:
        if one.startswith("-"):
            raise Refusal(
                f"--plugins removes none here: '{plain(one)}'",
                where=f"--plugins {plain(plugins)}",
                fix="name an OP, or --kernel NAME, to select kernels",
            )
    return [*named]


def _numbered(numbers: Sequence[int] | None, targets: Sequence[Target]) -> set[Case] | None:
    """Return the cases with these numbers, of every op; None: all.

    Raises:
        Refusal: a number is out of range for every op.
    """
    from minillm_kit.kernels.examples import CASES

    if numbers is None:
        return None
    ops = {one.offer.candidate.op for one in targets}
    last = max(len(CASES[op]) for op in ops) - 1
    if beyond := [number for number in numbers if number > last]:
        raise Refusal(
            f"there is no case {beyond[0]}",
            where=f"--case {beyond[0]}",
            fix=f"0 to {last}, or leave it out for all",
        )
    return {one for op in ops for number, one in enumerate(CASES[op]) if number in numbers}


def _refuse_nothing(rows: Sequence[Row], kernel: str | None) -> None:
    """Check that at least one row has a case to run.

    Raises:
        BackendError: no row has one.
    """
    if any(row.cases for row in rows):
        return
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.refused:
            on = f"{row.target.offer.called} on {row.target.calls.backend}"
            reasons.setdefault(row.refused, {})[on] = None
    whole = [f"{why} ({', '.join(names)})" for why, names in reasons.items()]
    first, *more = whole or ["the cases chosen are for other devices"]
    raise BackendError(
        f"kernel '{plain(kernel)}' cannot serve here: {first}"
        if kernel
        else f"no kernel serves: {first}",
        where="; ".join([*([f"--kernel {plain(kernel)}"] if kernel else []), *more]) or None,
        fix="another --device, --backend or --dtype; minillm kernels list shows what serves where",
    )


def _called(row: Row) -> str:
    return f"{row.target.offer.called} {row.target.calls.backend} {row.dtype}"


# The table


def render(report: Report, console: Console) -> None:
    """Print a line for each kernel on each backend, the failures, and a summary."""
    from minillm_kit.kernels.examples import CASES
    from minillm_kit.kernels.trial import PROPERTIES

    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=UNKNOWN_WIDTH)
    console.print(_table(report))
    note = "cells: worst error / tolerance of the op's contract"
    if not all(row.target.offer.candidate.within_tolerance for row in report.rows):
        note += f"; {OUTSIDE} outside it, as the kernel declares (used only where named)"
    console.print(Text(note, "dim"))
    failures = [(row, *one) for row in report.failed for one in row.failures]
    for row, index, failure in failures[:SHOWN]:
        case = CASES[row.target.offer.candidate.op][index]
        lines = [
            f"{_called(row)} failed: {failure.property}: {PROPERTIES[failure.property]}",
            f"  found: {failure.found}",
            f"  in:    {case.name}",
            f"  again: {report.again(row, index)}",
        ]
        console.print()
        console.print(Text("\n".join(lines)), soft_wrap=True)  # whole lines: one is copied
    if len(failures) > SHOWN:
        console.print()
        console.print(Text(f"and {len(failures) - SHOWN} more: --json lists all"))
    console.print()
    for reason, names in _refusals(report).items():
        console.print(Text(f"not checked, {reason}: {', '.join(names)}", "dim"), soft_wrap=True)
    cases = sum(len(row.cases) for row in report.rows)
    served = [row for row in report.rows if row.cases]
    state = (
        f"{len(report.failed)} of {counted(len(served), 'row')} failed"
        if report.failed
        else "all held"
    )
    if report.lost:
        lost = f"the device no longer responds; nothing was checked after\n  {report.lost}"
        console.print(Text(lost, "bold red"), soft_wrap=True)
    line = f"{counted(cases, 'case')} in {report.seconds:.0f} s: {state}"
    console.print(Text(line, "bold red" if report.failed else "green"), soft_wrap=True)


def _table(report: Report) -> Table:
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("kernel", overflow="fold")
    table.add_column("on", no_wrap=True)
    for name in (*dtypes, "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst in", overflow="fold")
    targets = dict.fromkeys(row.target for row in report.rows if row.cases)
    for target in targets:
        rows = {row.dtype: row for row in report.rows if row.target is target}
        served = [row for row in rows.values() if row.cases]
        worst = max(served, key=lambda row: row.worst.share)
        spread = max(row.spread for row in served)
        table.add_row(
            target.offer.called,
            f"{target.calls.backend} {target.calls.device}",
            *(_cell(rows[name]) for name in dtypes),
            f"{spread:.0e}" if spread else "none",
            Text(_place(worst)),
        )
    return table


OUTSIDE = "*"
"""Mark of a cell: the kernel is used only where named."""


def _cell(row: Row) -> Text:
    number = f"{row.worst.share:.2f}"
    outside = "" if row.target.offer.candidate.within_tolerance else OUTSIDE
    return {
        "passed": Text(f"{number}{outside}", "green"),
        "failed": Text(f"FAILED {number}", "bold red"),
        "refused": Text("refused", "dim"),
        "no memory": Text("no memory", "yellow"),
    }[row.verdict]


def _place(row: Row) -> str:
    from minillm_kit.kernels.examples import CASES

    if row.worst_case is None:
        return ""
    return f"{row.worst.what}, {CASES[row.target.offer.candidate.op][row.worst_case].name}"


def _refusals(report: Report) -> dict[str, list[str]]:
    """Group by reason the kernels that support no case, and those out of memory for some."""
    from minillm_kit.kernels.examples import CASES

    found: dict[str, dict[str, None]] = {}
    reasons: dict[Target, set[str]] = {}
    for row in report.rows:
        reasons.setdefault(row.target, set()).add("" if row.cases else row.refused)
    for row in report.rows:
        if not row.cases and row.refused:
            in_all = len(reasons[row.target]) == 1  # dtypes
            name = (
                f"{row.target.offer.called} {row.target.calls.backend}" if in_all else _called(row)
            )
            found.setdefault(row.refused, {})[name] = None
        for index in row.no_memory:
            name = CASES[row.target.offer.candidate.op][index].name
            found.setdefault(f"no memory for {name}", {})[_called(row)] = None
    return {reason: list(names) for reason, names in found.items()}
