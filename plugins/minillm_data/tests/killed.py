"""The program, which kills itself before or after the AT-th thing that it does with its folder; 0: never.

killed.py AT PART NOTED ...    with parts of PART bytes, progress noted every NOTED seconds
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from minillm_core.cli.main import main as program
from minillm_data import output


def main(arguments: Sequence[str]) -> None:
    """Run the program with the arguments after the first three; exit with its code."""
    at, output.PART, output.NOTED = int(arguments[0]), int(arguments[1]), float(arguments[2])
    seen = count(1)

    def dies(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            found = None
            for moment in range(2):
                if next(seen) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if moment == 0:
                    found = function(*given, **named)
            return found

        return call

    written = ("write", "dealt_with", "note_progress", "close_part", "finish")
    for owner, name in (*((output.Output, name) for name in written), (output, "replace_file")):
        setattr(owner, name, dies(getattr(owner, name)))
    sys.exit(program(arguments[3:]))


if __name__ == "__main__":
    main(sys.argv[1:])
