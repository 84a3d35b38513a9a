"""``minillm eval``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "evaluate", "render"]

EXAMPLES = """Examples:

minillm eval runs/tiny-1 --data my_text.txt

minillm eval runs/tiny-1 --data my_texts/ --seq-len 512 --max-tokens 100000 --json
"""


def evaluate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a finished run.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH", help="The text: a file or a folder, in file order; may be repeated."
        ),
    ],
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens in a window; windows do not overlap. Default: the run's.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="M", min=1, help="Stop after so many predictions. Default: all."),
    ] = None,
    plugins: options.RunPlugins = None,
    backend: options.Backend = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Measure a run's loss and bits per byte on text.

    On any machine: only plugins that shaped the model, its data or its loss are needed.
    """
    from minillm_core.cli.cache import cache_folder
    from minillm_core.cli.console import emit, say, write
    from minillm_core.config.selection import select
    from minillm_core.train.evaluate import evaluate_run

    specs, _ = select({}, plugins)
    result = evaluate_run(
        out,
        data,
        seq_len=seq_len,
        max_tokens=max_tokens,
        backend=backend or "auto",
        device=device or "auto",
        plugins=specs,
        cache=cache_folder(),
        say=say,
    )
    if as_json:
        emit(result)
    else:
        write(render(result))


def render(result: Mapping[str, Any]) -> str:
    """The result as a person reads it."""
    rate = result["bits_per_byte"]
    return "\n".join(
        (
            f"val_loss       {result['val_loss']:.4f}",
            f"bits_per_byte  {'unknown: no tokenizer' if rate is None else f'{rate:.4f}'}",
            f"tokens         {result['tokens']:,}",
        )
    )
