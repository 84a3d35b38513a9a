"""``minillm plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from minillm_core.cli import options
from minillm_core.errors import Refusal

__all__ = ["EXAMPLES", "plan"]

EXAMPLES = """Examples:

minillm plan --preset gpt2-124m

minillm plan --plugins muon,paired_heads --json

minillm plan --diff muon muon,paired_heads

minillm plan --preset speedrun --diff '' -smear
"""


def plan(
    assignments: options.Assignments = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A,B C,D",
            help="Compare two sets of plugins; '' adds none, -NAME takes one away.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    plugins: options.Plugins = None,
    preset: options.Preset = None,
    data: options.Data = None,
    init: options.Init = None,
    out: options.Out = None,
    resume: options.Resume = False,
    steps: options.Steps = None,
    seed: options.Seed = None,
    file: options.SettingsFile = None,
    backend: options.Backend = None,
    device: options.Device = None,
    deterministic: options.Deterministic = False,
    kernels: options.Kernels = None,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Show what would be trained: by whom, at what cost. Needs no GPU and writes nothing."""
    from minillm_core.cli.prepare import Asked

    if diff and plugins is not None:
        raise Refusal(
            "--diff names both sets of plugins",
            where=f"--plugins {plugins} --diff {diff[0]} {diff[1]}",
            fix="leave --plugins out",
        )
    asked = Asked.of(
        plugins=plugins,
        preset=preset,
        file=file,
        assignments=assignments,
        data=data,
        steps=steps,
        seed=seed,
        backend=backend,
        device=device,
        deterministic=deterministic,
        kernels=kernels,
        init=init,
        resume=resume,
        out=out,
    )
    from minillm_core.cli.plan_show import show_diff, show_plan

    if diff:
        show_diff(asked, *diff, json=as_json)
    else:
        show_plan(asked, json=as_json)
