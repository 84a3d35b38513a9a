"""The flags that several commands share: their names, and what ``--help`` says about them.

Values are checked where settings are loaded, so that a wrong flag, a wrong line in a file and a
wrong ``key=value`` are refused in the same words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.config.presets import SHAPES, recipe_names

__all__ = [
    "AsJson",
    "Assignments",
    "Backend",
    "Data",
    "Debug",
    "Deterministic",
    "Device",
    "Help",
    "Init",
    "Kernels",
    "Out",
    "Plugins",
    "Preset",
    "Resume",
    "RunPlugins",
    "Seed",
    "SettingsFile",
    "Steps",
    "help_without_command",
]

_CHOICE = "What and where"
_SETTINGS = "Settings"
_MACHINE = "Machine"

Plugins = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Plugins to add; -NAME takes one away; ./file.py:Class names a single file.",
        rich_help_panel=_CHOICE,
    ),
]
RunPlugins = Annotated[
    str | None,
    typer.Option(
        "--plugins",
        metavar="A,./B.py:C",
        help="Name the run's single-file plugins again: their code is not taken from OUT.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(SHAPES)}; with plugins: {', '.join(recipe_names())}; "
        "default: tiny on a CPU, small on a GPU or Mac.",
        rich_help_panel=_CHOICE,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="A text file or folder, may be repeated; default: Python's standard library.",
        rich_help_panel=_CHOICE,
    ),
]
Init = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Start from a model directory: its shape, its weights, its tokenizer.",
        rich_help_panel=_CHOICE,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Where the run goes; default: runs/PRESET-N.", rich_help_panel=_CHOICE
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        metavar="",
        help="Go on with the run in --out from its newest good checkpoint.",
        rich_help_panel=_CHOICE,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", help="Optimizer steps.", rich_help_panel=_SETTINGS),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Initial weights and other randomness; the data order is data.seed's.",
        rich_help_panel=_SETTINGS,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", metavar="TOML", help="A file of settings.", rich_help_panel=_SETTINGS
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="auto|torch|mlx", help="The framework that trains.", rich_help_panel=_MACHINE
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="cpu, cuda, cuda:1 or mps; gpu for mlx.", rich_help_panel=_MACHINE
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        metavar="",
        help="The same bits again on the same GPU.",
        rich_help_panel=_MACHINE,
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        metavar="auto|strict|reference|OP=NAME,..",
        help="Which kernels serve the ops: by a word, by name, or both: strict,attention=sdpa; "
        "OP=reference takes an op's plain one.",
        rich_help_panel=_MACHINE,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", metavar="", help="Write one JSON document to stdout, nothing else."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings: train.lr=0.001, eval.tokens=10000 (all of them: docs/settings.md); "
        "a plugin's options: NAME.option=value.",
        show_default=False,
    ),
]


def help_without_command(context: typer.Context) -> None:
    """Answer a group's name alone with its help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# A switch's metavar is empty, or the help would show "<bool>" beside it.
# typer's own --help makes it import pydantic for every command, `minillm plugins list` as well.
Help = Annotated[
    bool,
    typer.Option(
        "--help", metavar="", callback=_show_help, is_eager=True, help="Show this message and exit."
    ),
]
# main() takes --debug out of the arguments wherever it stands; here it is declared for --help.
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")]
