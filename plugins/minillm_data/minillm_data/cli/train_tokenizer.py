"""``minillm data train-tokenizer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.commands import AsJson, display, emit, say, write
from minillm_data.cli import Malformed, Paths, check_malformed

EXAMPLES = """Examples:

minillm data train-tokenizer corpus.jsonl.xz --to tokenizer.json

minillm data train-tokenizer corpus/ --to tokenizer.json --vocab 50257

minillm train --data corpus/ data.tokenizer=tokenizer.json"""


def train_tokenizer_command(
    paths: Paths,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The tokenizer.json to write.")],
    vocab: Annotated[
        int | None,
        typer.Option(
            "--vocab",
            metavar="N",
            help="Vocabulary size; default: 32,768, or for little text one entry per 800 bytes.",
        ),
    ] = None,
    malformed: Malformed = "strict",
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE on the text of some files: a seeded sample of at most 64 MiB.

    The same files give the same tokenizer; <|endoftext|> is entry 0.
    """
    from minillm_data.train_tokenizer import train_tokenizer

    how = check_malformed(malformed)
    with display(say) as shown:
        _, report = train_tokenizer(
            paths, to, vocab=vocab, malformed=how, say=shown.say, progress=shown.progress
        )
    if as_json:
        emit({**report, "to": str(to)})
        return
    drawn, total = report["sample_bytes"], report["text_bytes"]
    on = "" if drawn == total else f", trained on a sample of {drawn / 1e6:,.1f} MB"
    write(f"{report['entries']:,} entries of {total / 1e6:,.1f} MB of text{on}: {to}")
