"""Deduplication in small steps, killed at the N-th time that it opens, renames or removes a file of its folder.

killed_dedup.py SOURCE TO N    0: never; its last line tells how many times there were
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

from minillm_data import dedup, output, spans

EVENTS = ("open", "os.rename", "os.remove", "os.truncate")


def main(arguments: Sequence[str]) -> None:
    """Deduplicate a file."""
    source, to, after = arguments
    dedup._BATCH, dedup._NOTED, output.PART, spans._LOAD = 4000, 60_000, 20_000, 1000
    seen = count(1)

    def watch(event: str, given: Any) -> None:
        if event in EVENTS and ".unfinished" in str(given[0]) and next(seen) == int(after):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    dedup.dedup([source], to, spans=6, processes=1, say=print)
    print("events", next(seen) - 1)


if __name__ == "__main__":
    main(sys.argv[1:])
