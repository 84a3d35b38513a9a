"""``minillm losses``: draws the training loss of runs, one line each.

``minillm --help`` reads the summary from this file and imports nothing; the module is imported when
the command is run. EXAMPLES is shown below the command's own help.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from minillm_core import Refusal

__all__ = ["EXAMPLES", "drawn", "losses", "read_losses"]

EXAMPLES = """Examples:

minillm losses runs/tiny-1

minillm losses runs/tiny-1 runs/tiny-2 --width 40"""

LEVELS = "_.-~=*#"


def losses(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT", help="Folders of runs.")],
    width: Annotated[
        int, typer.Option(metavar="N", min=2, help="Characters of each drawing.")
    ] = 60,
) -> None:
    """Draw the training loss of runs, one line each: first, drawing, last, folder."""
    found = [(out, read_losses(out)) for out in outs]  # nothing is printed before all is read
    for out, values in found:
        typer.echo(f"{values[0]:.3f} {drawn(values, width)} {values[-1]:.3f}  {out}")


def read_losses(out: Path) -> list[float]:
    """Read the loss of every step from a run's metrics.

    Raises:
        Refusal: the folder holds no step of a run; the command ends with exit code 2.
    """
    file = out / "metrics.jsonl"
    try:
        events = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        fix = "give the folder of a run, such as runs/tiny-1"
        raise Refusal(f"{out} holds no metrics of a run", where=str(file), fix=fix) from error
    values = [event["loss"] for event in events if event["event"] == "step"]
    if not values:
        raise Refusal(f"the run in {out} made no step", where=str(file))
    return values


def drawn(values: Sequence[float], width: int) -> str:
    """Draw values in at most ``width`` characters, each the mean of its share of them."""
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means) or 1.0
    return "".join(LEVELS[round((mean - low) / span * (len(LEVELS) - 1))] for mean in means)
