"""``minillm data mix``: mixtures of sources whose proportions hold over any stretch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm_core.commands import AsJson, counted, display, emit, plain, say, write
from minillm_data.cli import FILES, Malformed, To, check_malformed

EXAMPLES = """Examples:

minillm data mix books.jsonl:0.7 code.jsonl:0.3 --to mixed

minillm data mix books.jsonl wiki/ --to mixed --temperature 3 --repeat --size 2000000000

minillm data mix books.jsonl:0.5 code.jsonl:0.5 --to mixed --tokenizer tokenizer.json --json

minillm data mix books.jsonl code.jsonl wiki/ --to mixed --doremi 500

minillm data mix web/ --to picked --like wiki.jsonl --size 500000000
"""


def mix_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH[:WEIGHT]",
            help=f"{FILES} A number after the last colon is the weight.",
            show_default=False,
        ),
    ],
    to: To,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Sampling temperature without weights: shares in proportion to size^(1/T). "
            "Default: 1, which takes all.",
        ),
    ] = None,
    like: Annotated[
        list[str] | None,
        typer.Option(
            "--like",
            metavar="TARGET",
            help="Select documents similar to those of a file or folder (DSIR); may be repeated.",
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            "--size",
            metavar="N",
            help="Maximum size of the output: bytes of text, or tokens with --tokenizer.",
        ),
    ] = None,
    repeat: Annotated[
        bool,
        typer.Option("--repeat", metavar="", help="Repeat a source once it is exhausted."),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer.json: weights are shares of its tokens, not of bytes.",
        ),
    ] = None,
    doremi: Annotated[
        int | None,
        typer.Option(
            "--doremi",
            metavar="STEPS",
            help="Learn the weights with two small runs of STEPS steps each (DoReMi).",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Preset (model shape and training) of the --doremi runs. Default: tiny.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Seed of the sampling by --like. Default: 0."),
    ] = None,
    malformed: Malformed = "strict",
    as_json: AsJson = False,
) -> None:
    """Mix sources by weight, by size, by weights learned in two small runs, or by similarity to a target.

    After any number of documents each source has its share, to within the longest document. The
    mixture ends as soon as the source that is next in turn has no document left.
    """
    from minillm_data.mix import epochs, mix

    kind = check_malformed(malformed)
    with display(say) as shown:
        report = mix(
            paths,
            to,
            temperature=temperature,
            like=like or (),
            size=size,
            repeat=repeat,
            tokenizer=tokenizer,
            doremi=doremi,
            preset=preset,
            seed=seed,
            malformed=kind,
            say=shown.say,
            progress=shown.progress,
        )
    if as_json:
        emit(report)
        return
    unit = report["unit"]
    for one in report["sources"]:
        if like:
            share = f"{one['picked']:,} of {counted(one['documents'], 'document')} picked"
        else:
            share = (
                f"{100 * one['share_written']:.2f} % (asked: {100 * one['share']:.2f} %), "
                f"{counted(one['documents'], 'document')}, {epochs(one)}"
            )
        write(f"{plain(one['path'])}: {one['written']:,} {unit}, {share}")
    for note, count in report["left_out"].items():
        write(plain(f"{note}: {count:,}"))
    end = "" if like else f"; {plain(report['ended'])}"
    write(f"{report['total']:,} {unit} in {counted(report['documents'], 'document')} in {to}{end}")
