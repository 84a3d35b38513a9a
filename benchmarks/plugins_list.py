"""Time of ``minillm plugins list``, as a whole process, with 50 plugins installed.

    python -m benchmarks.plugins_list

Prints one JSON object: median and range in seconds, and the fraction that starting Python takes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import environment

NUM_PLUGINS = 50
REPEATS = 15
LIST = [sys.executable, "-m", "minillm_core", "plugins", "list"]
NOTHING = [sys.executable, "-c", "pass"]

SOURCE = '''
from minillm_core import Plugin, option
{padding}

class Trick(Plugin, api=1):
    """Trick number {number}, which does nothing."""

    width: int = option(12, ge=1, help="input features that it reads")

    def build_attention(self, attn): ...
'''
PADDING = "".join(f"\ndef helper_{n}(x):\n    return [x * y + {n} for y in x]\n" for n in range(30))


def install(site: Path, number: int) -> None:
    """Write a distribution with one plugin, as installed by pip; its module has 100 lines."""
    info = site / f"trick_{number}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: trick-{number}\nVersion: 1.0\n")
    entry = f"trick_{number} = trick_{number}.trick:Trick"
    (info / "entry_points.txt").write_text(f"[minillm.plugins]\n{entry}\n")
    package = site / f"trick_{number}"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "trick.py").write_text(SOURCE.format(number=number, padding=PADDING))


def timed(command: Sequence[str], site: Path) -> tuple[float, str]:
    """Measure the whole process in seconds; return them and its output."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    return time.perf_counter() - start, done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        for number in range(NUM_PLUGINS):
            install(site, number)
        _, listed = timed(LIST, site)  # also warms the file cache
        if listed.count("which does nothing") != NUM_PLUGINS:
            raise SystemExit(f"the list does not hold the {NUM_PLUGINS} plugins:\n{listed}")
        seconds = [timed(LIST, site)[0] for _ in range(REPEATS)]
        idle = [timed(NOTHING, site)[0] for _ in range(REPEATS)]
    figures = {
        "benchmark": "plugins_list",
        "plugins": NUM_PLUGINS,
        "median_seconds": round(statistics.median(seconds), 4),
        "range_seconds": [round(min(seconds), 4), round(max(seconds), 4)],
        "python_alone_seconds": round(statistics.median(idle), 4),
        "repeats": REPEATS,
    }
    print(json.dumps({"figures": figures, "environment": environment()}))


if __name__ == "__main__":
    main()
