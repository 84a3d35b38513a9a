"""``minillm chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from minillm_core import DataError, Interrupted
from minillm_core.commands import (
    AsJson,
    InferenceOptions,
    SamplingOptions,
    display,
    emit,
    say,
    write,
)

EXAMPLES = """Examples:

minillm chat runs/chat

minillm chat runs/chat --system "Answer in one sentence." --temperature 0

printf 'Hello!\\nAnd now?\\n' | minillm chat runs/chat --seed 1 --json"""


def chat_command(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder of a run, or a model directory.")
    ],
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message of the conversation."),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", help="Maximum number of tokens per answer.", min=1
        ),
    ] = 512,
    *,
    sampling: SamplingOptions,
    read: InferenceOptions,
    as_json: AsJson = False,
) -> None:
    """Talk with a model that was trained on chats (minillm train --task sft).

    In a terminal: type a line; Ctrl-C ends an answer, and at the prompt the conversation, as Ctrl-D
    does. In a pipe every line of stdin is a turn, and stdout has the answers.
    """
    from minillm_chat.talk import ChatModel, Talk, check_text, open_chat

    sampling.rule()
    typed = sys.stdin.isatty()
    with display(say) as shown:
        run = open_chat(out, read, shown)
        model = ChatModel.of(run)
        run.writer()  # loads the model: a framework whose import Ctrl-C broke off crashes at the next
    notes: list[str] = []
    shown.say = notes.append  # of an answer: shown below it, not within
    seed = sampling.chosen_seed()
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    talk = Talk(model, {**drawn, "max_tokens": max_tokens, "seed": seed})
    if system is not None:
        talk.messages.append({"role": "system", "content": check_text(system, "--system")})
    for line in _lines(typed):
        if not line.strip():
            continue
        pieces = talk.ask(check_text(line, "stdin"))
        try:
            for piece in pieces:
                if not as_json:
                    write(piece, end="")
        except KeyboardInterrupt:
            if not typed:
                raise Interrupted("interrupted: the conversation ends here") from None
        finally:
            pieces.close()
            if not as_json:
                write("")
            while notes:
                say(notes.pop(0).strip())
    if as_json:
        emit({"messages": talk.messages, "seed": seed, "step": run.step})


def _lines(typed: bool) -> Iterator[str]:
    """Yield the lines of stdin, with a prompt in a terminal.

    Raises:
        Interrupted: Ctrl-C.
        DataError: not UTF-8.
    """
    while True:
        try:
            if typed:
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            raise Interrupted("interrupted: the conversation ends here") from None
        except UnicodeDecodeError as error:
            raise DataError(
                "stdin is not UTF-8", where=f"stdin: {error.reason}", fix="convert it to UTF-8"
            ) from error
        if not line:
            return
        yield line.rstrip("\n")
