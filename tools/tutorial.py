"""Runs a page: writes its files, types its commands, and compares what they say with what it shows.

A block of code is one of two kinds, and every block of the page has to be one of them:

    ```python title=my_trick.py      is written to that file (any language)
    ```console                       lines that begin with "$ " are typed, the others are the output
    ```console figures=any           the same; a number stands for any other, digits apart

In an output ``...`` stands for anything, and on a line of its own for any lines or none; spaces count
as one, and empty lines as none. A command without an output may say what it likes. One that fails is
followed by ``$ echo $?`` and its code. ``cd`` is kept from one command to the next.
"""

from __future__ import annotations

import doctest
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "PageError", "blocks", "run_page"]

_FENCE = re.compile(
    r"^```(\w*)(?: title=(\S+)| (figures=any))?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_AT_ALL = re.compile(r"^```", re.MULTILINE)
_NUMBER = re.compile(r"\d(?:[\d,.:]*\d)?")
_LIMIT = 600  # seconds a command


class PageError(AssertionError):
    """A page shows what is not so; says the line, the command and both outputs."""


@dataclass(frozen=True)
class Block:
    """One block of code."""

    line: int
    language: str
    title: str | None
    figures: bool  # any will do
    text: str

    def commands(self) -> Iterator[tuple[int, str, str]]:
        """Return (line, command, output as shown)."""
        for match in re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE):
            yield self.line + 1 + self.text[: match.start()].count("\n"), match[1], match[2]


def blocks(page: str) -> list[Block]:
    """Return every block of the page.

    Raises:
        PageError: one that is neither a file nor commands, so that nothing would run it.
    """
    found = []
    for match in _FENCE.finditer(page):
        line = page[: match.start()].count("\n") + 1
        block = Block(line, match[1], match[2], match[3] is not None, match[4])
        if not (block.title or (block.language == "console" and block.text.startswith("$ "))):
            raise PageError(f"line {line}: neither a file (title=...) nor commands ($ ...)")
        found.append(block)
    if 2 * len(found) != len(_AT_ALL.findall(page)):
        raise PageError("a block of code that does not end, or that is written otherwise")
    return found


def run_page(page: str, folder: Path, environment: Mapping[str, str]) -> int:
    """Do what the page says, from its top to its end.

    Args:
        page: its text.
        folder: an empty one.
        environment: variables of the commands.

    Returns:
        How many commands were run.

    Raises:
        PageError: a command says something else, or fails without the page saying so.
    """
    typed: list[tuple[int, str, str]] = []
    here, code, count = folder, 0, 0
    for block in blocks(page):
        if block.title:
            file = here / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, "utf-8")
            continue
        typed = list(block.commands())
        for (line, command, shown), after in zip(typed, [*typed[1:], None], strict=True):
            if command.startswith("cd "):
                here = (here / command[3:]).resolve(strict=True)
                continue
            done = subprocess.run(
                ["bash", "-c", f"(exit {code})\n{command}"],  # so that $? is the one before
                cwd=here,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_LIMIT,
                check=False,
            )
            code, count = done.returncode, count + 1
            if code and (after is None or after[1] != "echo $?"):
                raise PageError(f"line {line}: $ {command}\nended with {code}:\n{done.stdout}")
            if shown.strip() and not _alike(shown, done.stdout, figures=block.figures):
                raise PageError(f"line {line}: $ {command}\nshown:\n{shown}\nsaid:\n{done.stdout}")
    return count


def _alike(shown: str, said: str, *, figures: bool) -> bool:
    """Return whether a command printed what the page shows."""
    if figures:
        shown, said = (_NUMBER.sub("0", text) for text in (shown, said))
    want = "".join("..." if line == "..." else f"<{line}>" for line in _lines(shown))
    got = "".join(f"<{line}>" for line in _lines(said))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def _lines(text: str) -> list[str]:
    """Return the lines that are not empty, spaces as one."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
