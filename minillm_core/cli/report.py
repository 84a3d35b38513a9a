"""``minillm report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "report"]

EXAMPLES = """Examples:

minillm report runs/tiny-1

minillm report runs/ablation-1

minillm report runs/tiny-1 --no-sample
"""


def report(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder of a run or of an ablation.")
    ],
    no_sample: Annotated[
        bool,
        typer.Option("--no-sample", metavar="", help="Leave out what the model writes."),
    ] = False,
    plugins: options.RunPlugins = None,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Write OUT/report.html: a run's curves, speed, memory, plan and plugins, on one page.

    The run may be going on, or have been killed. Of an ablation, ablation.html is written anew.
    """
    from minillm_core.cli.console import say, write
    from minillm_core.config.selection import select
    from minillm_core.measure.report import report as write_report

    specs, _ = select({}, plugins)
    write(str(write_report(out, plugins=specs, sample=not no_sample, say=say)))
