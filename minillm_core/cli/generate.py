"""``minillm generate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from minillm_core.cli import options

__all__ = ["EXAMPLES", "generate"]

EXAMPLES = """Examples:

minillm generate runs/tiny-1 "Once upon a time"

minillm generate runs/tiny-1 "def main():" --temperature 0 --max-tokens 50

minillm generate runs/tiny-1 - --top-k 50 --top-p 0.95 --seed 1 < prompt.txt
"""

_DRAWING = "How tokens are drawn"


def generate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a run.")],
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="The text to go on with; - reads it from stdin; without it a document begins. "
            "One that begins with a dash comes last, after --.",
            show_default=False,
        ),
    ] = "",
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Stop after so many tokens, if the text has not ended."
        ),
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            help="Lower is safer; 0 always takes the likeliest token.",
            rich_help_panel=_DRAWING,
        ),
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Draw from the K likeliest tokens. Default: from all.",
            rich_help_panel=_DRAWING,
        ),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Draw from the fewest likeliest tokens of probability P together; 1: from all.",
            rich_help_panel=_DRAWING,
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Draw the same again. Default: a new one each time, which is shown.",
            rich_help_panel=_DRAWING,
        ),
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache", metavar="", help="Compute every token from the whole text, slowly."
        ),
    ] = False,
    plugins: options.RunPlugins = None,
    backend: options.Backend = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Go on with a text: write it, and what a run's model puts after it.

    On any machine: only plugins that shaped the model, its data or its loss are needed.
    """
    import secrets

    from minillm_core.cli.console import emit, say
    from minillm_core.config.selection import select
    from minillm_core.train.generate import open_writer
    from minillm_core.train.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p)
    prompt = _prompt(prompt)
    specs, _ = select({}, plugins)
    writer, run = open_writer(
        out, backend=backend or "auto", device=device or "auto", plugins=specs, say=say
    )
    if seed is None:
        seed = secrets.randbits(32)
        if temperature > 0:
            say(f"drawn with --seed {seed}")
    generation = writer.go_on(
        prompt, sampling, tokens=max_tokens, seed=seed, cached=not no_cache, say=say
    )
    if not as_json:
        _write(writer.text(generation, prompt))
        return
    emit(
        {
            "prompt": prompt,
            "text": "".join(writer.text(generation)),
            "ids": generation.ids,
            "ended": generation.ended,
            "seed": seed,
            "step": run.checkpoint.step,
            "checkpoint": str(run.checkpoint.path),
        }
    )


def _prompt(given: str) -> str:
    """The prompt, from stdin if it is ``-``.

    Raises:
        Refusal: it is not UTF-8.
    """
    from minillm_core.errors import Refusal

    try:
        if given == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        given.encode("utf-8")  # bytes of the command line that are no UTF-8 became surrogates
        return given
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        where = "stdin" if given == "-" else "PROMPT"
        raise Refusal(
            "the prompt is not UTF-8",
            where=f"{where}: {error.reason}, at {error.start}",
            fix="save it as UTF-8",
        ) from error


def _write(pieces: Iterator[str]) -> None:
    """Write text as it comes, and end its line, also where it ends too early.

    Raises:
        Interrupted: by Ctrl-C.
    """
    from minillm_core.cli.console import write
    from minillm_core.errors import Interrupted, MinillmError

    try:
        for piece in pieces:
            write(piece, end="")
    except KeyboardInterrupt:
        write("")
        raise Interrupted("interrupted: the text ends here") from None
    except MinillmError:
        write("")
        raise
    write("")
