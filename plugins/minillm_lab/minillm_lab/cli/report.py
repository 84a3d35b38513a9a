"""``minillm report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.commands import RunPlugins, say, write

EXAMPLES = """Examples:

minillm report runs/tiny-1

minillm report runs/ablation-1

minillm report runs/tiny-1 runs/tiny-2

minillm report runs/tiny-1 --no-sample
"""


def report(
    outs: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT",
            help="Folder of a run, an ablation or a search; several runs are compared on one page.",
        ),
    ],
    no_sample: Annotated[
        bool,
        typer.Option("--no-sample", metavar="", help="Leave out samples of generated text."),
    ] = False,
    plugins: RunPlugins = None,
) -> None:
    """Write OUT/report.html: a run's curves, samples, speed, memory, plan and plugins, on one page.

    The run may be unfinished or killed. An ablation's ablation.html and a search's search.html are
    written again; several runs are compared in comparison.html, in the first one's folder.
    """
    from minillm_lab.report import compare
    from minillm_lab.report import report as write_report

    if len(outs) > 1:
        write(str(compare(outs, plugins=plugins)))
    else:
        write(str(write_report(outs[0], plugins=plugins, sample=not no_sample, say=say)))
