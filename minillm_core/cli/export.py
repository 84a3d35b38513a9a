"""``minillm export``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from minillm_core.cli import options
from minillm_core.cli.console import emit, say, write

EXAMPLES = """Examples:

minillm export runs/tiny-1 --to my_model

minillm export runs/tiny-1 --to my_model --best

minillm export runs/tiny-1 --to my_model --json
"""


def export(
    out: options.Out,
    to: Annotated[Path, options.value("DIR", "Folder to write the model to: new or empty.")],
    step: options.Step = None,
    best: options.Best = False,
    plugins: options.RunPlugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Export a trained model for Transformers, vLLM and mlx-lm."""
    from minillm_core.train.run import Run

    result = Run.open(out, plugins=plugins, step=step, best=best, say=say).export(to)
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
