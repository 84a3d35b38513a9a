"""``minillm kernels list``: every op, its kernels, what this machine takes and why not the others."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.commands import AsJson, Plugins, emit, say
from minillm_kit.kernels_check import refuse_dtype

if TYPE_CHECKING:
    from minillm_kit.kernels.listing import Listed, Listing

EXAMPLES = """Examples:

minillm kernels list

minillm kernels list attention --preset gpt2-124m --plugins windows

minillm kernels list linear_cross_entropy --device cuda --dtype bfloat16 train.rows=64

minillm kernels list --backend mlx --json
"""

UNKNOWN_WIDTH = 140
"""Width of a table written to a file, where COLUMNS is not set."""

STYLES = {
    "taken": "bold green",
    "passed over": "",
    "only where named": "yellow",
    "plugin not named": "cyan",
    "cannot": "dim",
}


def list_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP|KEY=VALUE",
            help="Ops to list, by default all; settings of the run that the list is for.",
            show_default=False,
        ),
    ] = None,
    plugins: Plugins = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Preset of the run; default: as for train.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="torch|mlx", help="Framework of the run; default: as for train."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="cpu, cuda, cuda:1 or mps; gpu for mlx; need not be present. Default: as for train.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="float32, bfloat16 or float16. Default: by preset and device."
        ),
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Kernels to use, as for train.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List each op's kernels: the one that a run uses on this machine, and why not the others.

    Kernels of installed plugins are listed too, with the plugin that must be named. No kernel is
    imported, no framework either, and no data is read.
    """
    from minillm_core import build_plan, load
    from minillm_core.inspection import choose, from_assignments, probe
    from minillm_kit.kernels.listing import listing
    from minillm_kit.kernels.offers import offers

    if dtype not in (None, "auto"):
        refuse_dtype(dtype, "listed")
    ops = [word for word in words or () if "=" not in word]
    given = from_assignments([word for word in words or () if "=" in word]).settings
    flags = {"backend": backend, "device": device, "kernels": kernels, "train.dtype": dtype}
    settings = {key: one.value for key, one in given.items()}
    settings |= {key: value for key, value in flags.items() if value is not None}
    with redirect_stdout(sys.stderr):  # a plugin's own prints
        named = [one.strip() for one in (plugins or "").split(",") if one.strip()]
        found = offers([one for one in named if not one.startswith("-")])
        chosen = found.of(ops)
        loaded = load(preset, plugins=plugins, settings=settings)
        plan, config = build_plan(loaded), loaded.config
        detected = choose(probe(), config.backend, config.device)
        result = listing(plan, detected, chosen, every=found.kernels)
    for name, reason in found.broken.items():
        say(f"note: the kernels of plugin '{name}' are left out: {reason}")
    if as_json:
        emit(result.data())
        return
    render(result, Console())


def render(result: Listing, console: Console) -> None:
    """Print a table for each op, with the op's request."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=UNKNOWN_WIDTH)
    request = next(iter(result.requests.values()))
    rows = [_cells(one) for one in result.kernels]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for op, kernels in groupby(result.kernels, lambda one: one.offer.candidate.op):
        console.print(Text(f"{op}: {_tolerance(op, request.dtype)}", "bold"))
        table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
        for width in widths:
            table.add_column(no_wrap=True, width=width)
        table.add_column(overflow="fold")
        for one in kernels:
            table.add_row(*_cells(one), Text(one.words, STYLES[one.state]))
        console.print(table)
    compiled = "compiled" if request.compiled else "eager"
    line = f"for a run with {request.backend}, {request.device}, {request.dtype}, {compiled}; "
    console.print(Text(f"{line}for another: minillm kernels list --help", "dim"))


def _tolerance(op: str, dtype: str) -> str:
    from minillm_core.inspection import CONTRACTS

    contract = CONTRACTS.get(op)
    return f"within {contract.tolerance[dtype]:.0e} in {dtype}" if contract else "no contract"


def _cells(one: Listed) -> tuple[str, str, str]:
    """Return a kernel's name, its source and its purpose."""
    from minillm_core import Candidate

    candidate = one.offer.candidate
    plugin = one.offer.plugin
    serves_all = set(candidate.devices) == set(Candidate.devices)
    devices = "any" if serves_all else ", ".join(candidate.devices)
    return (
        candidate.name,
        "core" if plugin is None else f"--plugins {plugin}",
        f"{'/'.join(candidate.backends)}: {devices}",
    )
