"""``minillm doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from minillm_core import Refusal
from minillm_core.commands import AsJson, pip_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from minillm_lab.doctor import Finding

EXAMPLES = """Examples:

minillm doctor

minillm doctor --json > doctor.json
"""

STYLES = {
    "ok": "green",
    "optional": "dim",
    "warning": "yellow",
    "missing": "dim",
    "broken": "bold red",
}


def doctor(as_json: AsJson = False) -> None:
    """Check what this machine can run, what is missing, and how to install it.

    Exits with code 2 if something that every run needs is broken. The pip commands keep the
    installed torch and mlx.
    """
    from minillm_core.commands import cache_folder, emit

    try:
        from minillm_lab.doctor import can_run, diagnose
    except ModuleNotFoundError as error:  # the core's requirements have the names of their modules
        needed = error.name or str(error)
        raise Refusal(
            f"minillm-core needs {needed}, which is not installed",
            where=sys.executable,
            fix=pip_line(needed),
        ) from error

    findings, facts = diagnose(cache_folder())
    able = can_run(findings)
    if as_json:
        emit({"can_run": able, "findings": [one.data() for one in findings], "facts": facts})
    else:
        from rich.console import Console

        render(findings, Console())
    if not able:
        raise typer.Exit(2)


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print each finding, wrapped on a terminal; below it the command, on one line for copying."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    parts = max(len(one.part) for one in findings)
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000, color_system=None)
    for one in findings:
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(no_wrap=True)
        line.add_column(overflow="fold")
        lead = Text.assemble((f"{one.state:<8}", STYLES[one.state]), f" {one.part:<{parts}}")
        line.add_row(lead, Text(one.line))
        console.print(line)
        if one.command:
            console.print(Text(f"{'':<{parts + 11}}{one.command}", "bold"), soft_wrap=True)
