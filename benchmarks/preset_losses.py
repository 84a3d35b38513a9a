r"""Losses and speed of whole runs of a preset with additional plugin sets, for equal steps, seed by seed.

    python -m benchmarks.preset_losses --preset speedrun --steps 320 \
        --set=cute --set=-relu2,fp8_head,fp8_mlp,sparse_rows,cute \
        --train train.jsonl.xz --val val.jsonl.xz --tokenizer bpe.json

All are compiled side by side and trained in turns on one GPU, with the same seeds on the same text. The
figures that decide: whether a set's losses lie within the spread of the preset's seeds, and its speed over
whole runs, schedules and waiting for data included.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command import written
from benchmarks.preset_steps import ALONE, plugins_and_settings
from benchmarks.whole_runs import difference, in_turns, settings_of, training
from minillm_core import Plan, build_plan, load
from minillm_core.inspection import read_value
from minillm_lab.paired_runs import with_evaluation
from minillm_lab.study import Trained

__all__ = ["main"]


def main() -> None:
    """Train every set with every seed, write the result file, and print a table."""
    parser = training(__doc__, "preset_losses")
    parser.add_argument("--preset", default="speedrun")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PLUGINS [KEY=VALUE ...]", help="added to it"
    )
    parser.add_argument("--steps", type=int, default=320)
    given = parser.parse_args()
    settings = settings_of(given) | {"train.steps": given.steps}

    def planned(plugins: str, own: Sequence[str] = ()) -> Plan:
        chosen = settings | {
            key: read_value(text) for key, text in (one.split("=", 1) for one in own)
        }
        plan = build_plan(load(preset=given.preset, settings=chosen, plugins=plugins or None))
        return with_evaluation(plan, given.predictions)

    plans = {
        ALONE: planned(""),
        **{name: planned(*plugins_and_settings(name)) for name in given.set},
    }
    runs = in_turns(plans, given)
    data = {name: [one.data() for one in some] for name, some in runs.items()}
    print(written(given, {"preset": given.preset, **figures_of(runs), "runs": data}))


def figures_of(runs: Mapping[str, Sequence[Trained]]) -> dict[str, Any]:
    """Compute losses, their differences from the preset's by seed, and tokens/s; print them."""
    found: dict[str, Any] = {}
    for name, some in runs.items():
        speed = statistics.median(one.tokens_per_second for one in some)
        losses = [one.val_loss for one in some]
        found[name] = {"losses": losses, "tokens_per_second": round(speed)}
        if name != ALONE:
            found[name]["difference"] = difference(some, runs[ALONE])
            found[name]["speed"] = round(speed / found[ALONE]["tokens_per_second"], 4)
        print(name, found[name])
    return {"sets": found}


if __name__ == "__main__":
    main()
