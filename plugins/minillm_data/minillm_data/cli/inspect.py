"""``minillm data inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from minillm_core.commands import AsJson, display, emit, printable, say, write
from minillm_data.cli import Malformed, Paths, check_malformed

EXAMPLES = """Examples:

minillm data inspect corpus.jsonl.xz

minillm data inspect tokens/ --samples 10

minillm data inspect corpus/ --tokenizer tokenizer.json --page corpus.html"""

_BAR = 40


def inspect_command(
    paths: Paths,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer.json that counts tokens of text and decodes ids; default: the one "
            "beside the shards.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Number of documents to show.", min=0)
    ] = 3,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Also write an HTML page.")
    ] = None,
    malformed: Malformed = "strict",
    as_json: AsJson = False,
) -> None:
    """Show the contents of data: documents, tokens, a histogram of lengths, a digest, decoded samples."""
    from minillm_data.inspect import facts, inspect, write_page

    how = check_malformed(malformed)
    with display(say) as shown:
        found = inspect(
            paths,
            tokenizer=tokenizer,
            samples=samples,
            malformed=how,
            say=shown.say,
            progress=shown.progress,
        )
    if page:
        write_page(found, page)
    if as_json:
        emit(asdict(found))
        return
    for name, value in facts(found).items():
        write(f"{name:<10}  {value}")
    write(f"\nlengths in {found.unit}")
    most = max(count for _, _, count in found.histogram)
    for first, last, count in found.histogram:
        span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        write(f"{span:>24} {count:>12,} {'█' * round(_BAR * count / most)}")
    for one in found.samples:
        write(f"\ndocument {one['document']:,}, {one['length']:,} {found.unit}:")
        write("\n".join(f"  | {line}" for line in printable(one["text"]).splitlines()))
    if page:
        write(f"\n{page}")
