"""``minillm generate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from minillm_core.cli import options
from minillm_core.cli.console import emit, say, write
from minillm_core.errors import Interrupted, Refusal
from minillm_core.train.progress import display

EXAMPLES = options.examples(
    'minillm generate runs/tiny-1 "Once upon a time"',
    'minillm generate runs/tiny-1 "def main():" --temperature 0 --max-tokens 50',
    'minillm generate runs/tiny-1 "def main():" --best',
    "minillm generate runs/tiny-1 - --top-k 50 --top-p 0.95 --seed 1 < prompt.txt",
)


def generate(
    out: options.Model,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="Text to continue; - reads it from stdin. Default: a new document. "
            "A prompt that begins with a dash goes last, after --.",
            show_default=False,
        ),
    ] = "",
    max_tokens: Annotated[
        int, options.value("N", "Generate at most N tokens; the text may end earlier.", min=1)
    ] = 256,
    no_cache: Annotated[
        bool,
        options.switch(
            "--no-cache", "Use no KV cache: compute every token from the whole text, slowly."
        ),
    ] = False,
    *,
    drawing: options.SamplingOptions,
    read: options.InferenceOptions,
    as_json: options.AsJson = False,
) -> None:
    """Continue a prompt with a run's model.

    Runs on any machine, and needs only the plugins that change the model, its data or its loss.
    """
    sampling = drawing.rule()
    prompt = _prompt(prompt)
    with display(say) as shown:
        run = read.open(out, shown)
        writer = run.writer()
    seed, notes = drawing.chosen_seed(), list[str]()
    generation = writer.generate(
        prompt, sampling, tokens=max_tokens, seed=seed, cached=not no_cache, say=notes.append
    )
    if as_json:
        text = "".join(writer.text(generation))
        told = {"ids": generation.ids, "ended": generation.ended, "seed": seed, "step": run.step}
        emit({"prompt": prompt, "text": text, **told, "checkpoint": str(run.checkpoint)})
    else:
        _write(writer.text(generation, prompt))
    for note in notes:  # below the text, not within
        say(note.strip())


def _prompt(given: str) -> str:
    """Return the prompt, from stdin if it is ``-``.

    Raises:
        Refusal: it is not UTF-8.
    """
    try:
        if given == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        given.encode("utf-8")  # bytes of the command line that are not UTF-8 became surrogates
        return given
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        where = "stdin" if given == "-" else "PROMPT"
        raise Refusal(
            "the prompt is not UTF-8",
            where=f"{where}: {error.reason}, at {error.start}",
            fix="save it as UTF-8",
        ) from error


def _write(pieces: Iterator[str]) -> None:
    """Write text as it is generated, and end the line even after an error.

    Raises:
        Interrupted: on Ctrl-C.
    """
    try:
        for piece in pieces:
            write(piece, end="")
    except KeyboardInterrupt:
        raise Interrupted("interrupted: the text ends here") from None
    finally:
        write("")
