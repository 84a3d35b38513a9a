"""``minillm plugins``: its commands and their flags; what they do is in a file each."""

from __future__ import annotations

from typing import Annotated

import typer

from minillm_core.cli import options
from minillm_core.cli.options import AsJson, Debug, Help, help_without_command

__all__ = ["app"]

app = typer.Typer(
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def root(context: typer.Context, debug: Debug = False, show_help: Help = False) -> None:
    """See which plugins are installed and what each can do; begin one of your own."""
    help_without_command(context)


# Switches alone: any other kind of parameter makes typer import pydantic.
@app.command("list", epilog="Examples:\n\nminillm plugins list\n\nminillm plugins list --json")
def list_command(as_json: AsJson = False, debug: Debug = False, show_help: Help = False) -> None:
    """List the installed plugins without importing any; a broken one says why."""
    from minillm_core.cli.plugins_list import list_json, list_plugins, render_list

    entries = list_plugins()
    if as_json:
        from minillm_core.cli.console import emit

        emit(list_json(entries))
        return
    from rich.console import Console

    render_list(entries, Console())


@app.command(
    "info",
    epilog="Examples:\n\nminillm plugins info muon\n\n"
    "minillm plugins info ./my_trick.py:MyTrick --preset small",
)
def info_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, or ./file.py:Class.")],
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="The preset on which its slots are shown.")
    ] = "tiny",
    as_json: AsJson = False,
    debug: Debug = False,
    show_help: Help = False,
) -> None:
    """Show one plugin: its options with types and defaults, and the slots it takes on a preset."""
    from minillm_core.cli.console import emit
    from minillm_core.cli.plugins_info import info, render_info
    from minillm_core.cli.slots import slots_on
    from minillm_core.config.presets import plugins_of

    shown = info(name, slots_on(preset), plugins_of(preset))
    if as_json:
        emit(shown)
        return
    from rich.console import Console

    render_info(shown, Console())


@app.command(
    "new",
    epilog="Examples:\n\nminillm plugins new head_gate\n\n"
    "minillm plugins new my_rule --kind optimizer --dir ~/plugins",
)
def new_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the plugin will be called.")],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="What it begins as: attention, model, loss, optimizer, kernel, data or observer.",
        ),
    ] = "attention",
    folder: Annotated[
        str,
        typer.Option(
            "--dir", metavar="DIR", help="The folder minillm-NAME is made in; default: here."
        ),
    ] = ".",
    debug: Debug = False,
    show_help: Help = False,
) -> None:
    """Write a complete package: a plugin that works, its reference, tests and CI; no network."""
    from pathlib import Path

    from minillm_core.cli.console import write
    from minillm_core.cli.plugins_new import new

    write(new(name, kind, Path(folder).expanduser()))


@app.command(
    "check",
    epilog="Examples:\n\nminillm plugins check muon\n\n"
    "minillm plugins check ./my_trick.py:MyTrick my_trick.scale=0.5 --backend torch\n\n"
    "minillm plugins check muon --only slopes --only decodes\n\n"
    "minillm plugins check muon --pairs all --json > report.json",
)
def check_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, or ./file.py:Class.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME.OPTION=VALUE", help="Its options.", show_default=False),
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="both|torch|mlx", help="The frameworks to check it on.")
    ] = "both",
    pairs: Annotated[
        str, typer.Option(metavar="N|all", help="How many other plugins it is paired with.")
    ] = "5",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Run this check alone; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_help: Help = False,
) -> None:
    """Check a plugin: imports, plan, numbers, decoding, resume, beside others. Exit 3: one failed."""
    from minillm_core.cli.plugins_check import ChecksFailed, check, render_report

    report = check(name, options or (), backend=backend, pairs=pairs, only=only or ())
    if as_json:
        from minillm_core.cli.console import emit

        emit(report.data())
    else:
        from rich.console import Console

        render_report(report, Console())
    if report.failed:
        raise ChecksFailed.of(report)


@app.command(
    "why",
    epilog="Examples:\n\nminillm plugins why attn.qk --plugins qk_norm,paired_heads\n\n"
    "minillm plugins why layers.2.* --plugins muon,paired_heads\n\n"
    "minillm plugins why layers.0.attention.q.weight --plugins muon\n\n"
    "minillm plugins why opt --preset speedrun --all\n\n"
    "minillm plugins why linear_cross_entropy --device cpu --json",
)
def why_command(
    slot: Annotated[
        str,
        typer.Argument(
            metavar="SLOT",
            help="A slot, parameter, rule or op, or its beginning; * is any text: attn.*, "
            "model.mlp[3], opt.rule[muon].",
        ),
    ],
    assignments: options.Assignments = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", metavar="", help="Show the defaults of every parameter as well; --json does."
        ),
    ] = False,
    as_json: AsJson = False,
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
    debug: Debug = False,
    show_help: Help = False,
) -> None:
    """Say who owns a place in the plan and why, and what was refused there. Exit 2: a clash there."""
    from minillm_core.cli.plugins_why import show_why
    from minillm_core.cli.prepare import Asked

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
    show_why(asked, slot, json=as_json, everything=everything)
