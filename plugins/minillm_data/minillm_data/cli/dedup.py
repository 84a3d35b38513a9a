"""``minillm data dedup``: deduplication of documents."""

from __future__ import annotations

from typing import Annotated

import typer

from minillm_core.commands import AsJson, counted, display, emit, say, write
from minillm_data.cli import Malformed, Paths, To, check_malformed

EXAMPLES = """Examples:

minillm data dedup corpus.jsonl.xz --to deduplicated

minillm data dedup books/ web.jsonl.gz --to deduplicated --threshold 0.7

minillm data dedup corpus.jsonl --to deduplicated --no-near

minillm data dedup corpus.jsonl --to deduplicated --spans 50 --json
"""


def dedup_command(
    paths: Paths,
    to: To,
    near: Annotated[
        bool,
        typer.Option(
            "--near/--no-near",
            metavar="",
            help="Drop near duplicates of an earlier document, or only exact duplicates.",
        ),
    ] = True,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Minimum Jaccard similarity of near duplicates, 0.1 to 1; default: 0.8.",
            show_default=False,
        ),
    ] = None,
    shingle: Annotated[
        int | None,
        typer.Option(
            metavar="WORDS",
            help="Words per shingle; documents are compared as sets of shingles. Default: 4.",
            show_default=False,
        ),
    ] = None,
    spans: Annotated[
        int | None,
        typer.Option(
            metavar="WORDS",
            help="Remove every span of so many words, such as 50, that an earlier document contains.",
            show_default=False,
        ),
    ] = None,
    min_words: Annotated[
        int | None,
        typer.Option(
            metavar="WORDS",
            help="Minimum words left in a document that loses spans, else it is dropped; default: "
            "as --spans.",
            show_default=False,
        ),
    ] = None,
    malformed: Malformed = "strict",
    as_json: AsJson = False,
) -> None:
    """Drop documents that duplicate an earlier one; the first of each group stays.

    Exact duplicates by their bytes, near duplicates by MinHash and exact Jaccard similarity; --spans
    also cuts repeated spans of words. After a kill the same command resumes.
    """
    kind = check_malformed(malformed)
    with display(say) as shown:
        with shown.phase("starting"):
            from minillm_data.dedup import dedup
            from minillm_data.report import summary

        try:
            report = dedup(
                paths,
                to,
                near=near,
                threshold=threshold,
                shingle=shingle,
                spans=spans,
                min_words=min_words,
                malformed=kind,
                say=shown.say,
                progress=shown.progress,
            )
        except KeyboardInterrupt as error:
            from minillm_core import Interrupted

            raise Interrupted(
                "interrupted",
                where=f"{to}.unfinished",
                fix="the same command continues from there",
            ) from error
    for note, count in report["notes"].items():
        say(f"{note}: {count:,}")
    if as_json:
        emit(report)
        return
    for line in summary(report["counts"]):
        write(line)
    alike, share = report["with_a_duplicate"], 100 * report["share_with_a_duplicate"]
    write(
        f"{alike:,} of {counted(report['documents'], 'document')} ({share:.2f} %) "
        f"{'has' if alike == 1 else 'have'} a duplicate; the first of each group, which is kept, counts too"
    )
    if report["cut"]:
        write(
            f"cut out: {counted(report['cut']['spans'], 'span')} of {counted(report['cut']['words'], 'word')}"
        )
    write(f"written to {to}")
