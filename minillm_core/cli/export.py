"""``minillm export``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "export", "render"]

EXAMPLES = """Examples:

minillm export runs/tiny-1 --to my_model

minillm export runs/tiny-1 --to my_model --json
"""


def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a run.")],
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the model goes: a new or empty folder.")
    ],
    plugins: options.RunPlugins = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Write a run's model as Transformers, vLLM and mlx-lm load it."""
    from minillm_core.cli.console import emit, say, write
    from minillm_core.config.selection import select
    from minillm_core.train.export import export_run

    specs, _ = select({}, plugins)
    result = export_run(out, to, plugins=specs, say=say)
    if as_json:
        emit(result)
    else:
        write(render(result))


def render(result: Mapping[str, Any]) -> str:
    """The result as a person reads it."""
    folder, files = result["directory"], result["files"]
    width, quoted = max(map(len, files)), shlex.quote(folder)
    return "\n".join(
        (
            f"{folder}: a {result['layout']} model of {result['parameters']:,} parameters in "
            f"float32, as it was after step {result['step']:,}",
            *(f"  {name:{width}}  {size:>15,} bytes" for name, size in files.items()),
            "load it with",
            f"  transformers  AutoModelForCausalLM.from_pretrained({json.dumps(folder)})",
            f"  vLLM          vllm serve {quoted}",
            f"  mlx-lm        mlx_lm.generate --model {quoted} --prompt ...",
        )
    )
