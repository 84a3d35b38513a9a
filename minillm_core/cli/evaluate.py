"""``minillm eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "evaluate"]

EXAMPLES = """Examples:

minillm eval runs/tiny-1 --data my_text.txt

minillm eval runs/tiny-1 --data my_texts/ --seq-len 512 --max-tokens 100000 --json
"""


def evaluate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a finished run.")],
    data: Annotated[
        str, typer.Option(metavar="PATH", help="The text: a file or a folder, in file order.")
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
    backend: options.Backend = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Measure a run's loss and bits per byte on text."""
    from minillm_core.backends.detect import choose, probe
    from minillm_core.cli.console import emit, say
    from minillm_core.train.evaluate import evaluate as measure

    detected = choose(probe(), backend or "auto", device or "auto")
    result = measure(out, data, seq_len=seq_len, max_tokens=max_tokens, detected=detected, say=say)
    if as_json:
        emit(result)
        return
    rate = result["bits_per_byte"]
    print(f"val_loss       {result['val_loss']:.4f}")
    print(
        f"bits_per_byte  {'unknown: the run has no tokenizer' if rate is None else f'{rate:.4f}'}"
    )
    print(f"tokens         {result['tokens']:,}")
