"""``minillm eval``."""

from __future__ import annotations

from typing import Annotated

from minillm_core.cli import options
from minillm_core.cli.console import emit, say, write
from minillm_core.train.progress import display

EXAMPLES = options.examples(
    "minillm eval runs/tiny-1 --data my_text.txt",
    "minillm eval runs/tiny-1 --data my_text.txt --step 90",
    "minillm eval runs/tiny-1 --data my_texts/ --seq-len 512 --max-tokens 100000 --json",
)


def evaluate(
    out: options.Model,
    data: Annotated[
        list[str],
        options.value(
            "PATH", "Text to evaluate on: a file or a folder, read in file order; may be repeated."
        ),
    ],
    seq_len: Annotated[
        int | None,
        options.value(
            "N", "Context length; windows do not overlap. Default: the run's train.seq_len.", min=1
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, options.value("M", "Stop after M predictions. Default: all.", min=1)
    ] = None,
    *,
    read: options.InferenceOptions,
    as_json: options.AsJson = False,
) -> None:
    """Measure a run's loss and bits per byte on text.

    Runs on any machine, and needs only the plugins that change the model, its data or its loss.
    """
    with display(say) as shown:
        run = read.open(out, shown)
        found = run.evaluate(data, seq_len=seq_len, max_tokens=max_tokens)
    rate = found.bits_per_byte
    if as_json:
        emit(
            {
                "val_loss": found.val_loss,
                "bits_per_byte": rate,
                "tokens": found.tokens,
                "step": found.step,
                "checkpoint": str(run.checkpoint),
            }
        )
        return
    write(f"val_loss       {found.val_loss:.4f}")
    write(f"bits_per_byte  {'unknown: no tokenizer' if rate is None else f'{rate:.4f}'}")
    write(f"tokens         {found.tokens:,}")
