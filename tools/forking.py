"""The program ``minillm`` of any environment, whose commands are forked from a process that has imported it.

A start of Python with a framework takes seconds of a core, a fork milliseconds. ``forking.py MODULE ...`` runs in
that environment: it imports the modules, then reads lines of standard input, each a command in JSON, and answers
with exit codes. It imports nothing else but the standard library.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Forking"]

PROGRAM = "minillm_core.cli.main"
"""The module whose ``main`` is the program: it takes the arguments, and returns the exit code."""


class Forking:
    """A process that forks commands; as a context, it ends with it.

    Args:
        python: the environment's.
        imported: modules to import before the first command; those that are absent are left out.
        environment: environment variables of the process, and so of the commands.
        seconds: that a command may take.
    """

    def __init__(
        self,
        python: Path,
        imported: Sequence[str],
        environment: Mapping[str, str],
        seconds: float = 600.0,
    ) -> None:
        self._process = subprocess.Popen(
            [python, "-P", __file__, str(seconds), PROGRAM, *imported],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()  # it ends when its standard input does

    def run(self, words: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run ``minillm`` with these arguments in a folder; return its exit code and all that it said.

        Raises:
            RuntimeError: the process has ended; its standard error says why.
            TimeoutError: the command was killed.
        """
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as said:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            asked = {"words": [*words], "folder": str(folder), "said": said.name}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            if not (answer := self._process.stdout.readline()):
                raise RuntimeError(f"the process that forks has ended: {self._process.wait()}")
            if (code := json.loads(answer)) is None:
                raise TimeoutError(f"minillm {' '.join(words)} was not done in time")
            return code, said.read()


def main(arguments: Sequence[str]) -> None:
    """Import the modules, and answer lines of standard input until it ends."""
    seconds, *names = arguments
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # keeps prints of imports out of answers
        for name in names:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:  # they are not forked, and a child could wait for one
            sys.exit(f"importing {', '.join(names)} started {threads - 1} threads")
        gc.freeze()  # a child need neither walk over what is there, nor copy its pages
        for line in iter(sys.stdin.readline, ""):
            asked = json.loads(line)
            child = os.fork()
            if not child:
                os._exit(_answer(asked))
            print(json.dumps(_waited(child, float(seconds))), file=answers, flush=True)


def _waited(child: int, seconds: float) -> int | None:
    """Wait for a child; return its exit code, or None where it took too long and was killed."""
    watched = os.pidfd_open(child)
    late = not select.select([watched], [], [], seconds)[0]
    os.close(watched)
    if late:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if late else code


def _answer(asked: dict[str, Any]) -> int:
    """Run the program in this child as a new Python would; return its exit code."""
    said = os.open(asked["said"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate((nothing, said, said)):
        os.dup2(stream, number)
    os.close(said)
    os.close(nothing)
    os.chdir(asked["folder"])
    code = 1
    try:
        site.addsitedir(sysconfig.get_path("purelib"))  # what was installed since the start
        importlib.invalidate_caches()
        sys.argv = ["minillm", *asked["words"]]
        code = sys.modules[PROGRAM].main(asked["words"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    main(sys.argv[1:])
