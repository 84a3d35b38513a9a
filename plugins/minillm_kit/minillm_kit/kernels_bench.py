"""``minillm kernels bench``: the kernels of each op, timed in turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core import Refusal
from minillm_core.commands import AsJson, emit, plain, say
from minillm_kit.kernels_check import (
    Backend,
    Device,
    FromFiles,
    Kernel,
    Ops,
    refuse_dtype,
    targets_of,
)

if TYPE_CHECKING:
    from minillm_kit.kernels.bench import Limits
    from minillm_kit.kernels.calls import Calls

EXAMPLES = """Examples:

minillm kernels bench attention

minillm kernels bench linear_cross_entropy --device cuda

minillm kernels bench linear_cross_entropy --shape N=8192 --shape C=768 --shape V=50304

minillm kernels bench --repeats 9 --json > kernels.json
"""

UNKNOWN_WIDTH = 130
"""Width of a table written to a file, where COLUMNS is not set."""


def bench_command(
    ops: Ops = None,
    kernel: Kernel = None,
    backend: Backend = None,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: float32 on a CPU, bfloat16 elsewhere."),
    ] = None,
    plugins: FromFiles = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LETTER=N",
            help="A size by its letter in the op's contract: N=65536; may be repeated.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Timed turns per kernel; medians are reported.", min=1)
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Time kernels in turns: seconds, bytes, FLOPs, and the fraction of this machine's measured peak.

    The limits are a product of matrices in the dtype and a copy, measured in the same run. Arrays
    that fit a cache are read from it, so that a share of bytes may be above 100 %.
    """
    from minillm_kit.kernels.bench import bench, limits
    from minillm_kit.kernels.workloads import WORKLOADS

    if dtype is not None:
        refuse_dtype(dtype, "timed")
    given = _sizes(shape or ())
    results = []
    with redirect_stdout(sys.stderr):  # a plugin's own prints
        targets = targets_of(
            ops or (), kernel=kernel, backend=backend, device=device, plugins=plugins
        )
        by_op = dict.fromkeys(target.offer.candidate.op for target in targets)
        _check_letters(given, [*by_op])
        for calls in dict.fromkeys(target.calls for target in targets):
            kind = dtype or ("float32" if calls.kind == "cpu" else "bfloat16")
            say(f"timing on {calls.backend} {calls.device}, in {kind}")

            @cache
            def measure(calls: Calls = calls, kind: str = kind) -> Limits:
                say(f"measuring a product in {kind}, and a copy")
                return limits(calls, kind)

            for op in by_op:
                load = WORKLOADS[op]
                usual = load.small if calls.kind == "cpu" else load.large
                sizes = {letter: given.get(letter, size) for letter, size in usual.items()}
                offers = [
                    one.offer
                    for one in targets
                    if one.calls is calls and one.offer.candidate.op == op
                ]
                if offers:
                    results.append(
                        bench(offers, calls, kind, sizes, measure, repeats=repeats, say=say)
                    )
    if kernel is not None and not any(one["kernels"] for one in results):
        reasons = {f"{n}: {why}" for one in results for n, why in one["refused"].items()}
        raise Refusal(
            f"kernel '{plain(kernel)}' cannot serve here: {'; '.join(sorted(reasons))}",
            where=f"--kernel {plain(kernel)}",
            fix="another --device, --backend or --dtype; minillm kernels list shows what serves where",
        )
    if as_json:
        emit({"benches": results})
        return
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=UNKNOWN_WIDTH)
    for one in results:
        for line in render(one):
            console.print(line)


def _sizes(words: Sequence[str]) -> dict[str, int]:
    """Parse ``N=65536``.

    Raises:
        Refusal: invalid syntax.
    """
    found = {}
    for word in words:
        letter, _, number = word.partition("=")
        if not (letter and number.isascii() and number.isdigit()):
            raise Refusal(
                f"'{plain(word)}' is no size",
                where=f"--shape {plain(word)}",
                fix="a letter of the op's contract and a number: --shape N=65536",
            )
        found[letter] = int(number)
    return found


def _check_letters(given: Mapping[str, int], ops: Sequence[str]) -> None:
    """Check that every given size belongs to an op.

    Raises:
        Refusal: a size is unknown, or 0.
    """
    from minillm_kit.kernels.workloads import WORKLOADS

    letters = {letter: None for op in ops for letter in WORKLOADS[op].small}
    for letter, size in given.items():
        if letter not in letters:
            raise Refusal(
                f"no op that is timed has a size '{plain(letter)}'",
                where=f"--shape {plain(letter)}={size}",
                fix=f"one of {', '.join(letters)}",
            )
        if size == 0 and letter != "window":
            raise Refusal(
                "a size is at least 1", where=f"--shape {letter}=0", fix=f"--shape {letter}=1024"
            )


def render(one: Mapping[str, Any]) -> Iterator[Any]:
    """Print the timings, a line for each kernel, and the unsupported kernels."""
    sizes = " ".join(f"{letter}={n}" for letter, n in one["sizes"].items())
    heading = f"{one['op']} {sizes}, {one['dtype']} on {one['backend']} {one['device']}"
    if known := one["limits"]:
        flops, moved = known["flops_per_second"], known["bytes_per_second"]
        heading += f"; limits seen: {flops / 1e12:.3g} TFLOP/s, {moved / 1e9:.3g} GB/s"
    yield Text(heading, "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("kernel", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for name in (
        "ms",
        "lowest to\nhighest",
        "speed to\nthe first",
        "of the\nlimit",
        "extra\nmemory",
    ):
        table.add_column(name, justify="right", overflow="fold")
    for row in one["kernels"]:
        for name, work in one["work"].items():
            figures = row[name]
            table.add_row(
                row["kernel"] if name == "forward" else "",
                PASSES[name],
                f"{figures['seconds'] * 1e3:.3f}",
                f"{figures['low'] * 1e3:.3f} to {figures['high'] * 1e3:.3f}",
                f"{figures['speed_to_first']:.2f} x",
                f"{figures['share_of_limit']:.0%} of {work['bound_by']}",
                _bytes(figures["extra_bytes"]),
            )
    if one["kernels"]:
        yield table
    for name, reason in one["refused"].items():
        yield Text(f"not timed: {name}: {reason}", "dim")
    yield Text("")


PASSES = {"forward": "forward", "both": "and backward"}


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:,.1f} MiB"
