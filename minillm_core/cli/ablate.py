"""``minillm ablate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "ablate"]

EXAMPLES = """Examples:

minillm ablate --plugins muon,paired_heads --seeds 5 --steps 200

minillm ablate --plugins polar_express,normuon --with muon --minutes 0.5

minillm ablate --plugins muon,qk_norm,relu2 --leave-one-out --out runs/which

minillm ablate --plugins muon,qk_norm,relu2 --leave-one-out --out runs/which --json > effects.json

minillm ablate --preset speedrun --leave-one-out

minillm ablate --preset speedrun --plugins xsa
"""

_WHAT = "What is compared"


def ablate(
    assignments: options.Assignments = None,
    plugins: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Plugins to judge; those that the preset or the file names are then company. None "
            "given: all of those are judged. -NAME takes one away; ./file.py:Class names a file.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    company: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="A,B",
            help="Plugins that are active in every run, and not judged.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", help="Pairs of runs; 5 make a technique card.", rich_help_panel=_WHAT
        ),
    ] = 3,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            help="Each run takes as many steps as the first set makes in M minutes.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    leave_one_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-out/--one-at-a-time",
            metavar="",
            help="All of them against all but one; or each alone against none, the default.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    steps: options.Steps = None,
    preset: options.Preset = None,
    data: options.Data = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where it goes; one that was stopped is gone on with. Default: runs/ablation-N.",
        ),
    ] = None,
    seed: options.Seed = None,
    file: options.SettingsFile = None,
    backend: options.Backend = None,
    device: options.Device = None,
    kernels: options.Kernels = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Measure what each plugin is worth: paired seeds, the same data, 95 % intervals.

    Without --plugins every plugin of the preset or the file is judged.
    """
    from minillm_core.cli.ablate_show import show_ablation
    from minillm_core.cli.prepare import Asked

    asked = Asked.of(
        plugins=",".join(part for part in (company, plugins) if part) or None,
        preset=preset,
        file=file,
        assignments=assignments,
        data=data,
        steps=steps,
        seed=seed,
        backend=backend,
        device=device,
        kernels=kernels,
    )
    show_ablation(
        asked,
        judged=plugins,
        company=company,
        seeds=seeds,
        minutes=minutes,
        leave_one_out=leave_one_out,
        out=out,
        json=as_json,
    )
