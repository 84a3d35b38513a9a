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
from minillm_core.commands import AsJson, counted, emit, plain, say
from minillm_kit.kernels_check import (
    Backend,
    Device,
    FromFiles,
    Kernel,
    KernelsFailed,
    Ops,
    refuse_dtype,
    targets_of,
)

if TYPE_CHECKING:
    from minillm_kit.kernels.bench import Limits
    from minillm_kit.kernels.calls import Calls
    from minillm_kit.kernels.check import Target

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
            metavar="SIZE=N",
            help="A size by its name in the op's contract: N=65536, window=256; may be repeated.",
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
        for one in targets:
            _check_fit(one.offer.candidate.op, _whole(one, given))
        for calls in dict.fromkeys(target.calls for target in targets):
            kind = dtype or ("float32" if calls.kind == "cpu" else "bfloat16")
            say(f"timing on {calls.backend} {calls.device}, in {kind}")

            @cache
            def measure(calls: Calls = calls, kind: str = kind) -> Limits:
                say(f"measuring a product in {kind}, and a copy")
                return limits(calls, kind)

            for op in by_op:
                rivals = [
                    one for one in targets if one.calls is calls and one.offer.candidate.op == op
                ]
                if rivals:
                    sizes = _whole(rivals[0], given)
                    offers = [one.offer for one in rivals]
                    try:
                        one = bench(offers, calls, kind, sizes, measure, repeats=repeats, say=say)
                    except MemoryError as error:
                        raise Refusal(
                            f"the arguments of {op} do not fit into memory: {plain(str(error))}",
                            where=", ".join(f"{letter}={n}" for letter, n in sizes.items()),
                            fix="smaller sizes, by --shape",
                        ) from error
                    results.append(one)
    raised = [f"{one['op']}={name} {one['backend']}" for one in results for name in one["raised"]]
    if kernel is not None and not raised and not any(one["kernels"] for one in results):
        reasons = {f"{n}: {why}" for one in results for n, why in one["refused"].items()}
        raise Refusal(
            f"kernel '{plain(kernel)}' cannot serve here: {'; '.join(sorted(reasons))}",
            where=f"--kernel {plain(kernel)}",
            fix="another --device, --backend or --dtype; minillm kernels list shows what serves where",
        )
    if as_json:
        emit({"benches": results})
    else:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(file=console.file, width=UNKNOWN_WIDTH)
        for one in results:
            for line in render(one):
                console.print(line)
    if raised:
        raise KernelsFailed(
            f"{counted(len(raised), 'kernel')} raised an exception: {', '.join(raised)}",
            fix="minillm kernels check OP --kernel NAME tries a kernel in every case",
        )


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
                f"'{plain(word)}' is not a size",
                where=f"--shape {plain(word)}",
                fix="a size of the op's contract and a number: --shape N=65536",
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


def _whole(target: Target, given: Mapping[str, int]) -> dict[str, int]:
    """Return all sizes of a kernel's workload: those given, and the usual ones of its device."""
    from minillm_kit.kernels.workloads import WORKLOADS

    load = WORKLOADS[target.offer.candidate.op]
    usual = load.small if target.calls.kind == "cpu" else load.large
    return {letter: given.get(letter, size) for letter, size in usual.items()}


def _check_fit(op: str, sizes: Mapping[str, int]) -> None:
    """Check that an op's sizes fit each other.

    Raises:
        Refusal: H is not a multiple of K, or an odd number of features is to be rotated.
    """
    if op == "attention" and sizes["H"] % sizes["K"]:
        raise Refusal(
            f"H={sizes['H']} heads cannot share K={sizes['K']} key-value heads evenly",
            where=f"sizes of {op}: H={sizes['H']} K={sizes['K']}",
            fix=f"H a multiple of K: --shape H={sizes['H']} --shape K={sizes['H']}",
        )
    if op == "rotate" and sizes["D"] % 2:
        raise Refusal(
            f"features are rotated in pairs, and D={sizes['D']} is odd",
            where=f"sizes of {op}: D={sizes['D']}",
            fix=f"--shape D={sizes['D'] + 1}",
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
    for name, reason in one["raised"].items():
        yield Text(f"not timed: {name}: raised {reason}", "bold red")
    yield Text("")


PASSES = {"forward": "forward", "both": "and backward"}


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:,.1f} MiB"
