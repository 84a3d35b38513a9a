"""``minillm data tokenize``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from minillm_core.commands import AsJson, counted, display, emit, say, write
from minillm_data.cli import Malformed, Paths, To, check_malformed

EXAMPLES = """Examples:

minillm data tokenize corpus.jsonl.xz --to tokens

minillm data tokenize corpus/ --to tokens --tokenizer tokenizer.json

minillm data tokenize corpus/ --to rows --format bin2d --seq-len 1024

minillm train --data tokens data.tokenizer=tokens/tokenizer.json"""


def tokenize_command(
    paths: Paths,
    to: To,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer.json; default: a byte-level BPE trained on the text.",
        ),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(
            "--vocab",
            metavar="N",
            help="Vocabulary size of the trained tokenizer (at most 32,768, smaller for little "
            "text), or the bound on ids in text that is already tokenised.",
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="shards|bin|bin2d",
            help="Output format: shards of llm.c, or data sets of the first MiniLLM trainer, a "
            "document per sample.",
        ),
    ] = "shards",
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            help="For bin2d: row length; samples are padded or truncated to N + 1 tokens.",
        ),
    ] = None,
    malformed: Malformed = "strict",
    as_json: AsJson = False,
) -> None:
    """Encode text into token shards, which a run maps without reading any text.

    Shards have llm.c's header; a document begins with its end-of-text id. All cores are used; after
    a kill the same command resumes.
    """
    from minillm_data.tokenize import tokenize

    how = check_malformed(malformed)
    with display(say) as shown:
        report = tokenize(
            paths,
            to,
            tokenizer=tokenizer,
            vocab=vocab,
            format=format,
            seq_len=seq_len,
            malformed=how,
            say=shown.say,
            progress=shown.progress,
        )
    if as_json:
        emit(report)
        return
    write(
        f"{counted(report['tokens'], 'token')} of {counted(report['documents'], 'document')} "
        f"in {counted(len(report['files']), 'file')}: {to}"
    )
    for note, count in report["notes"].items():
        write(f"  {count:,} {note}")
    words = ["minillm", "train", "--data", str(to)]
    if report["tokenizer"]:
        words.append(f"data.tokenizer={to / 'tokenizer.json'}")
    words.append(f"model.vocab={report['vocab']}")
    write(f"next: {shlex.join(words)}")
