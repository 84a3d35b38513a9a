"""The program ``minillm`` of any environment, whose commands are forked from a process that has imported it.

``forking.py MODULE ...`` runs in that environment, with its own minillm-kit: it serves as ``minillm_kit.fresh`` does,
where each line of standard input is a command.
"""

from __future__ import annotations

import importlib
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from minillm_kit.fresh import exit_code, serve

__all__ = ["Forking"]

PROGRAM = "minillm_core.cli.main"
"""The module whose ``main`` is the program: it takes the arguments, and returns the exit code."""


class Forking:
    """A process that forks commands; as a context, it ends with it.

    Args:
        python: the environment's, which has minillm-kit.
        imported: modules to import before the first command; those that are absent are left out.
        environment: environment variables of the process, and so of the commands.
        seconds: that a command may take.

    Raises:
        RuntimeError: its start failed, or an import started a thread, which a fork would lose.
    """

    def __init__(
        self,
        python: Path,
        imported: Sequence[str],
        environment: Mapping[str, str],
        seconds: float = 600.0,
    ) -> None:
        self._process = subprocess.Popen(
            [python, "-P", __file__, PROGRAM, *imported],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._seconds = seconds
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self._process.kill()
            raise RuntimeError(f"importing {', '.join(imported)} started a thread, or failed")

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
            asked = {
                "words": [*words],
                "folder": str(folder),
                "said": said.name,
                "seconds": self._seconds,
            }
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            if not (answer := self._process.stdout.readline()):
                raise RuntimeError(f"the process that forks has ended: {self._process.wait()}")
            if (code := json.loads(answer)) is None:
                raise TimeoutError(f"minillm {' '.join(words)} was not done in time")
            return code, said.read()


def _answer(asked: dict[str, Any]) -> int:
    """Run the program in this child as a new Python would; return its exit code."""
    said = os.open(asked["said"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate((nothing, said, said)):
        os.dup2(stream, number)
    os.close(said)
    os.close(nothing)
    os.chdir(asked["folder"])
    site.addsitedir(sysconfig.get_path("purelib"))  # what was installed since the start
    importlib.invalidate_caches()
    sys.argv = ["minillm", *asked["words"]]
    return exit_code(lambda: sys.exit(sys.modules[PROGRAM].main(asked["words"])))


if __name__ == "__main__":
    serve(sys.argv[1:], _answer)
