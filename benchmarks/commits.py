"""Step time and memory of two commits on one machine: ``minillm bench`` of each in turns.

    git archive 4684f69 | tar x -C old && pip install --no-deps --target sites/old old old/plugins/*
    python -m benchmarks.commits sites/old sites/new --preset gpt2-124m --turns 3 -- --device cuda

A site is a folder with the distributions of one commit, which precede this environment's. Every turn is a
process of each site, in alternating order; arguments after ``--`` are passed to ``minillm bench``, with files as
absolute paths.
``figures.runs`` has every process: step_seconds (its median), tokens_per_second_by_turn, peak_bytes
and the plan's hash. The ratio is that of the medians, second site over first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.command import measuring, written


def main() -> None:
    parser = measuring(__doc__, "commits")
    parser.add_argument("sites", nargs=2, type=Path, help="folders that pip installed into")
    parser.add_argument("--preset", action="append", required=True)
    parser.add_argument("--turns", type=int, default=3)
    own, rest = split(sys.argv[1:])
    asked = parser.parse_args(own)
    runs = []
    for preset in asked.preset:
        for turn in range(asked.turns):
            for site in asked.sites if turn % 2 == 0 else asked.sites[::-1]:
                runs.append(one_run(site, preset, rest))
                print(
                    f"{preset} {site}: {runs[-1]['step_seconds'] * 1e3:.2f} ms a step",
                    file=sys.stderr,
                )
    ratios = {preset: ratio(runs, preset, asked.sites) for preset in asked.preset}
    print(written(asked, {"arguments": rest, "runs": runs, "step_seconds_ratio": ratios}))


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at ``--`` into the parts before and after it."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def one_run(site: Path, preset: str, rest: list[str]) -> dict[str, Any]:
    """Run ``minillm bench`` of a site in its own process, and return its figures.

    Raises:
        subprocess.CalledProcessError: it failed; its output is on stderr.
    """
    command = [sys.executable, "-m", "minillm_core", "bench", "--preset", preset, "--json", *rest]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(site.resolve())},
        cwd=site,  # not a checkout, whose minillm_core would be imported first
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (figures,) = json.loads(done.stdout)["sets"].values()
    kept = ("plan", "step_seconds", "tokens_per_second_by_turn", "peak_bytes")
    return {"preset": preset, "site": site.name, **{name: figures[name] for name in kept}}


def ratio(runs: list[dict[str, Any]], preset: str, sites: list[Path]) -> float:
    """Divide the second site's median step by the first one's."""
    first, second = (
        statistics.median(
            one["step_seconds"]
            for one in runs
            if (one["preset"], one["site"]) == (preset, site.name)
        )
        for site in sites
    )
    return second / first


if __name__ == "__main__":
    main()
