"""The options ``--gpus`` and ``--processes`` of commands that train many runs."""

from __future__ import annotations

from typing import Annotated

import typer

Gpus = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Train on N NVIDIA GPUs of this machine at the same time, one run on each.",
        rich_help_panel="Machine",
    ),
]

Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Processes for each GPU: they compile side by side and train in turns, each with its own "
        "weights in memory. Default: as many as memory and cores allow, where runs are compiled.",
        rich_help_panel="Machine",
    ),
]


def cards(gpus: int | None) -> tuple[str, ...]:
    """Return the devices of ``--gpus``; none if it is not given."""
    return tuple(f"cuda:{number}" for number in range(gpus or 0))
