"""Runner of a documentation page: writes its files, runs its commands, compares their output with the page.

Every block of code on the page must be of one of these kinds:

    ```python title=my_trick.py      is written to that file (any language)
    ```console                       lines that begin with "$ " are commands, the others are their output
    ```console figures=any           the same; a number matches any other number, apart from grouping

In an output ``...`` matches anything, and on a line of its own any number of lines; runs of spaces
count as one, and empty lines are ignored. A command without output on the page may print anything.
A failing command is followed by ``$ echo $?`` and its exit code. ``cd`` persists between commands.
"""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "PageError", "blocks", "run_page"]

_FENCE = re.compile(
    r"^```(\w*)(?: title=(\S+)| (figures=any))?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_AT_ALL = re.compile(r"^```", re.MULTILINE)
_NUMBER = re.compile(r"\d(?:[\d,.:]*\d)?")
_LIMIT = 600  # seconds per command
_OF_SHELL = re.compile(r"[|&;<>$`*?#~\\]")


class PageError(AssertionError):
    """A page that differs from reality; names the line, the command and both outputs."""


@dataclass(frozen=True)
class Block:
    """One block of code."""

    line: int
    language: str
    title: str | None
    figures: bool  # whether numbers match any number
    text: str

    def commands(self) -> Iterator[tuple[int, str, str]]:
        """Return (line, command, output as shown)."""
        for match in re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE):
            yield self.line + 1 + self.text[: match.start()].count("\n"), match[1], match[2]


def blocks(page: str) -> list[Block]:
    """Parse every block of the page.

    Raises:
        PageError: a block is neither a file nor commands, so that nothing would run it.
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


def run_page(
    page: str,
    folder: Path,
    environment: Mapping[str, str],
    minillm: Callable[[Sequence[str], Path], tuple[int, str]] | None = None,
) -> int:
    """Run the page from top to bottom.

    Args:
        page: its text.
        folder: an empty folder.
        environment: environment variables of the commands.
        minillm: runs the program with arguments in a folder, and returns its exit code and its output; it takes
            the place of a shell if the page runs nothing but ``minillm``, except for the first time.

    Returns:
        The number of commands that were run.

    Raises:
        PageError: a command prints something else, or fails without the page showing it.
    """
    typed: list[tuple[int, str, str]] = []
    here, code, count, started = folder, 0, 0, False
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
            alone = command.startswith("minillm ") and not _OF_SHELL.search(command)
            if minillm and started and alone:
                code, said = minillm(shlex.split(command)[1:], here)
            else:
                code, said = _typed(f"(exit {code})\n{command}", here, environment)
            count, started = count + 1, started or alone
            if code and (after is None or after[1] != "echo $?"):
                raise PageError(f"line {line}: $ {command}\nended with {code}:\n{said}")
            if shown.strip() and not _alike(shown, said, figures=block.figures):
                raise PageError(f"line {line}: $ {command}\nshown:\n{shown}\nsaid:\n{said}")
    return count


def _typed(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a shell's command; ``(exit CODE)`` before it sets $? to the code of the one before."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    return done.returncode, done.stdout


def _alike(shown: str, said: str, *, figures: bool) -> bool:
    """Return whether a command's output matches the page."""
    if figures:
        shown, said = (_NUMBER.sub("0", text) for text in (shown, said))
    want = "".join("..." if line == "..." else f"<{line}>" for line in _lines(shown))
    got = "".join(f"<{line}>" for line in _lines(said))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def _lines(text: str) -> list[str]:
    """Return the non-empty lines, with runs of spaces collapsed."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
