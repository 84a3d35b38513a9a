"""``minillm bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = """Examples:

minillm bench

minillm bench --plugins muon --against none --preset gpt2-124m

minillm bench --plugins liger --against none train.rows=64 --steps 20 --repeats 7

minillm bench --plugins muon,windows --layers --trace trace.json

minillm bench --plugins qk_norm --json > bench.json
"""

_HOW = "What is timed"


def bench(
    assignments: options.Assignments = None,
    plugins: options.Plugins = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="C,D",
            help="Another set of plugins, timed in turns with the first; none: without those of --plugins; or, where it is not given, without the preset's.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(metavar="N", help="Steps that are timed together.", rich_help_panel=_HOW),
    ] = 10,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N", help="Turns of each set; figures are their medians.", rich_help_panel=_HOW
        ),
    ] = 5,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace that https://ui.perfetto.dev opens; one a set.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            metavar="",
            help="The time of each layer, of an eager step.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    preset: options.Preset = None,
    data: options.Data = None,
    seed: options.Seed = None,
    file: options.SettingsFile = None,
    backend: options.Backend = None,
    device: options.Device = None,
    kernels: options.Kernels = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Measure speed, memory, and where a step's time goes; two sets of plugins, if asked."""
    from minillm_core.cli.bench_show import show_bench
    from minillm_core.cli.prepare import Asked
    from minillm_core.measure.bench import Request

    request = Request(steps, repeats, layers, trace)
    request.check()
    asked = Asked.of(
        plugins=plugins,
        preset=preset,
        file=file,
        assignments=assignments,
        data=data,
        seed=seed,
        backend=backend,
        device=device,
        kernels=kernels,
    )
    show_bench(asked, request, against=against, json=as_json)
