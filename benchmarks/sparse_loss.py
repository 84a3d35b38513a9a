"""Speed of training on chats with the loss at supervised positions only, relative to the loss at every position.

    python -m benchmarks.sparse_loss CHATS.jsonl [...] [--tokenizer FILE] [--preset gpt2-124m]
        [--set key=value ...] [--rows packed,best_fit,bucketed] [--steps 20] [--repeats 7]

For each file and kind of rows both trainers are in one process and take turns (A B A B), as in
``minillm bench --plugins sft,sparse_loss --against sft``. The ratio is that of the medians, with the
lowest and highest of a turn's pair. A failing pair is reported, and the others are still measured.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import measuring, written
from minillm_core import build_plan, load
from minillm_core.inspection import choose, probe, read_value
from minillm_lab.bench import Request, bench
from minillm_lab.cli.bench import ratio_words

ROWS = {"packed": (), "best_fit": ("best_fit",), "bucketed": ("length_buckets",)}
"""Kind of rows -> the plugins that pack them; packed: chats contiguous."""

LEAST = 1.22
"""The required ratio."""


def main() -> None:
    """Measure every pair, write the result file, and print a table."""
    parser = measuring(__doc__, "sparse_loss")
    parser.add_argument("data", nargs="+", help="files of chats")
    parser.add_argument(
        "--tokenizer", help="a tokenizer.json; default: one is trained for each file"
    )
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--rows", default=",".join(ROWS), help="kinds of rows")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/minillm").expanduser())
    given = parser.parse_args()
    every = {key: read_value(text) for key, text in (one.split("=", 1) for one in given.set)}
    options = {key: value for key, value in every.items() if key.startswith("sparse_loss.")}
    settings = {key: value for key, value in every.items() if key not in options}
    if given.tokenizer:
        settings["data.tokenizer"] = given.tokenizer
    found = []
    for data in given.data:
        for rows in given.rows.split(","):
            one: dict[str, Any] = {"data": Path(data).name, "rows": rows}
            request = Request(given.steps, given.repeats)
            try:
                one |= pair(data, ROWS[rows], given.preset, settings, options, request, given.cache)
            except Exception as error:
                traceback.print_exc()
                one["failed"] = f"{type(error).__name__}: {error}"
            found.append(one)
            print(written(given, {"preset": given.preset, "least": LEAST, "pairs": found}))
    for one in found:
        print(line(one))


def pair(
    data: str,
    rows: Sequence[str],
    preset: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    request: Request,
    cache: Path,
) -> dict[str, Any]:
    """Time a file with and without; return the figures of both and their ratio, as JSON."""
    plans = {
        name: build_plan(
            load(preset, plugins=["sft", *rows, *more], data=data, settings=settings | own)
        )
        for name, more, own in (("sparse", ["sparse_loss"], options), ("dense", [], {}))
    }
    result = bench(request, plans, choose(probe()), cache=cache, say=print)
    for one in result["sets"].values():
        del one["plugins"]
    kept = {key: result[key] for key in ("backend", "device", "sets", "ratio")}
    return kept | {"fingerprint": result["data"]["fingerprint"]}


def line(one: dict[str, Any]) -> str:
    """Format a pair's ratio."""
    name = f"{one['data']}, {one['rows']}"
    if "failed" in one:
        return f"{name}: FAILED"
    ratio, sparse, dense = one["ratio"], one["sets"]["sparse"], one["sets"]["dense"]
    speeds = f"{sparse['tokens_per_second']:,.0f} / {dense['tokens_per_second']:,.0f} tokens/s"
    return f"{name}: {ratio_words(ratio)}, {speeds}, supervised {sparse['supervised_share']:.1%}"


if __name__ == "__main__":
    main()
