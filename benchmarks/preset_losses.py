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
from typing import Any

from benchmarks.command import measuring, written
from benchmarks.found_recipe import in_turns
from benchmarks.preset_steps import ALONE
from minillm_core import Plan, build_plan, load
from minillm_lab.paired_runs import with_evaluation
from minillm_lab.worth import effect_of

__all__ = ["main"]


def main() -> None:
    """Train every set with every seed, write the result file, and print a table."""
    parser = measuring(__doc__, "preset_losses")
    parser.add_argument("--preset", default="speedrun")
    parser.add_argument("--set", action="append", default=[], metavar="PLUGINS", help="added to it")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--predictions", type=int, default=1_048_576, help="of the evaluation")
    parser.add_argument("--train", required=True, help="the text to train on")
    parser.add_argument("--val", required=True, help="the text to validate on")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    settings = {
        "data.paths": [given.train],
        "data.val": given.val,
        "data.tokenizer": given.tokenizer,
        "device": given.device,
        "train.steps": given.steps,
    }

    def planned(plugins: str) -> Plan:
        plan = build_plan(load(preset=given.preset, settings=settings, plugins=plugins or None))
        return with_evaluation(plan, given.predictions)

    plans = {ALONE: planned(""), **{name: planned(name) for name in given.set}}
    runs = in_turns(plans, range(given.seeds), given.device)
    print(written(given, {"preset": given.preset, **figures_of(runs), "runs": runs}))


def figures_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compute losses, their differences from the preset's by seed, and tokens/s; print them."""
    base, found = runs[ALONE], {}
    for name, some in runs.items():
        losses = [one["curve"][-1]["val_loss"] for one in some]
        speed = statistics.median(one["tokens_per_second"] for one in some)
        found[name] = {"losses": losses, "tokens_per_second": round(speed)}
        if name != ALONE:
            pairs = [a - b["curve"][-1]["val_loss"] for a, b in zip(losses, base, strict=True)]
            own = found[ALONE]["tokens_per_second"]
            found[name] |= {"difference": effect_of(pairs).data(), "speed": round(speed / own, 4)}
        print(name, found[name])
    return {"sets": found}


if __name__ == "__main__":
    main()
