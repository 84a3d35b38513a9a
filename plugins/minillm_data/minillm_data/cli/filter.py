"""``minillm data filter``: quality, language and perplexity (bits per byte) filters of documents."""

from __future__ import annotations

from typing import Annotated

import typer

from minillm_core.commands import AsJson, counted, display, emit, plain, say, write
from minillm_data.cli import Malformed, Paths, To, check_malformed

EXAMPLES = """Examples:

minillm data filter corpus.jsonl.xz --to filtered

minillm data filter web/ --to filtered --language en --rules c4,-c4.punctuation,gopher,fineweb

minillm data filter books/ --to filtered --rules gopher,-gopher.long

minillm data filter corpus.jsonl --to filtered --rules none --language en,de --language-probability 0.9

minillm data filter corpus.jsonl --to filtered --rules none --model runs/tiny-1 --max-bits 2.5
"""


def filter_command(
    paths: Paths,
    to: To,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            metavar="A,B,-A.X",
            help="Rules: c4, gopher, fineweb, or a single rule of one (gopher.short); "
            "-c4.punctuation leaves a rule out; none: no rules. Default: gopher,fineweb. c4 also "
            "removes lines.",
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            metavar="en,de",
            help="Languages to keep, by the most likely language that py3langid detects.",
        ),
    ] = None,
    language_probability: Annotated[
        float | None,
        typer.Option(
            "--language-probability",
            metavar="P",
            help="Minimum probability of the language, 0 to 1. Default: 0.5.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="RUN",
            help="Run folder, whose checkpoint scores each document's first 2,048 tokens.",
        ),
    ] = None,
    min_bits: Annotated[
        float | None,
        typer.Option("--min-bits", metavar="X", help="Minimum bits per byte under the model."),
    ] = None,
    max_bits: Annotated[
        float | None,
        typer.Option("--max-bits", metavar="X", help="Maximum bits per byte under the model."),
    ] = None,
    malformed: Malformed = "strict",
    as_json: AsJson = False,
) -> None:
    """Filter documents by published rules, by language, or by their loss under a checkpoint.

    Drops are counted by reason, with examples in report.htm. Kept lines are copied byte for byte,
    unless c4 removes lines of their text.
    """
    from minillm_data.files import size_of
    from minillm_data.filter import filter_rows
    from minillm_data.report import summary

    kind = check_malformed(malformed)
    languages = [code.strip() for code in language.split(",")] if language is not None else []
    with display(say) as shown:
        report = filter_rows(
            paths,
            to,
            rules=rules,
            languages=languages,
            language_probability=language_probability,
            model=model,
            min_bits=min_bits,
            max_bits=max_bits,
            malformed=kind,
            say=shown.say,
            progress=shown.progress,
        )
    if as_json:
        emit(report)
        return
    sizes = report["bytes"]
    for line in summary(report["counts"], sizes):
        write(line)
    for name, count in report["lines"].items():
        write(f"{name}: {counted(count, 'line')} removed or changed")
    for note, count in report["left_out"].items():
        write(plain(f"{note}: {count:,}"))
    written, read = size_of(report["bytes_written"]), size_of(sum(sizes.values()))
    write(f"{written} of {read} written to {to}")
