"""``minillm plugins info``: its options. The implementation is in plugin_facts.py, which imports the planner."""

from __future__ import annotations

from typing import Annotated

import typer

from minillm_core.cli import options

EXAMPLES = options.examples(
    "minillm plugins info muon", "minillm plugins info ./my_trick.py:MyTrick --preset small"
)


def info_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, or ./file.py:Class.")],
    preset: Annotated[str, options.value("NAME", "Preset whose plan shows the slots.")] = "tiny",
    as_json: options.AsJson = False,
) -> None:
    """Show one plugin: options with types and defaults, and the slots it takes on a preset.

    This imports the plugin, and so runs its code; plugins list imports none.
    """
    from minillm_core.cli.plugin_facts import answer

    answer(name, preset, as_json=as_json)
