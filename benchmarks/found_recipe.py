r"""A recipe that ``minillm search`` found beside ``speedrun``, for equal seconds of training.

    python -m benchmarks.found_recipe --found search/best.toml --minutes 0.2 \
        --train train.jsonl.xz --val val.jsonl.xz --tokenizer bpe.json

Both are compiled side by side and trained in turns on one GPU, with the same seeds on the same text. The
cooldown of ``speedrun`` follows its rule for the number of steps that fit in the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.command import written
from benchmarks.whole_runs import difference, in_turns, settings_of, training
from minillm_core import Plan, build_plan, load
from minillm_lab.paired_runs import Length, with_evaluation

__all__ = ["main"]


def main() -> None:
    parser = training(__doc__, "found_recipe")
    parser.add_argument("--found", type=Path, required=True, help="the search's best.toml")
    parser.add_argument(
        "--beside", default="speedrun", help="the preset, or settings file, beside it"
    )
    parser.add_argument("--minutes", type=float, default=0.2, help="of training, of each run")
    parser.add_argument(
        "--steps",
        type=int,
        default=95,
        help="that the other makes in this time, for a rule by steps",
    )
    given = parser.parse_args()
    settings, length = settings_of(given), Length(minutes=given.minutes)

    def planned(preset: str, **more: Any) -> Plan:
        plan = build_plan(load(preset=preset, settings=settings | more))
        return with_evaluation(length.of(plan), given.predictions)

    plans = {
        "found": planned(str(given.found)),
        "beside": planned(given.beside, **{"train.steps": given.steps}),
    }
    runs = in_turns(plans, given)
    found = difference(runs["found"], runs["beside"])
    print("found - beside:", found)
    written(
        given,
        {
            "runs": {name: [one.data() for one in some] for name, some in runs.items()},
            "difference": found,
            "settings": {name: plan.config.model_dump(mode="json") for name, plan in plans.items()},
            "plugins": {name: [one.name for one in plan.active] for name, plan in plans.items()},
        },
    )


if __name__ == "__main__":
    main()
