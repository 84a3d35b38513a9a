r"""A recipe that ``minillm search`` found beside ``speedrun``, for equal seconds of training.

    python -m benchmarks.found_recipe --found search/best.toml --minutes 0.2 \
        --train train.jsonl.xz --val val.jsonl.xz --tokenizer bpe.json

Both are compiled side by side and trained in turns on one GPU, with the same seeds on the same text. The
cooldown of ``speedrun`` is the one of its rule for the number of steps that the time allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import measuring, written
from minillm_core import Plan, build_plan, load
from minillm_core.commands import cache_folder
from minillm_core.studies import StopRequest
from minillm_lab.paired_runs import Length, with_evaluation
from minillm_lab.pool import Pool, Wanted
from minillm_lab.study import Trained, open_corpus
from minillm_lab.worth import effect_of

__all__ = ["in_turns", "main"]


def main() -> None:
    parser = measuring(__doc__, "found_recipe")
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
    }
    length = Length(minutes=given.minutes)

    def planned(preset: str, **more: Any) -> Plan:
        plan = build_plan(load(preset=preset, settings=settings | more))
        return with_evaluation(length.of(plan), given.predictions)

    plans = {
        "found": planned(str(given.found)),
        "beside": planned(given.beside, **{"train.steps": given.steps}),
    }
    runs = in_turns(plans, range(given.seeds), given.device)
    differences = [
        runs["found"][seed]["curve"][-1]["val_loss"] - runs["beside"][seed]["curve"][-1]["val_loss"]
        for seed in range(given.seeds)
    ]
    found = effect_of(differences).data()
    print("found - beside:", found)
    written(
        given,
        {
            "runs": runs,
            "difference": found,
            "settings": {name: plan.config.model_dump(mode="json") for name, plan in plans.items()},
            "plugins": {name: [one.name for one in plan.active] for name, plan in plans.items()},
        },
    )


def in_turns(
    plans: Mapping[str, Plan], seeds: Iterable[int], device: str
) -> dict[str, list[dict[str, Any]]]:
    """Train every plan with every seed on one GPU, a process each, one at a time; print and return the runs.

    The text is tokenised once, for all of them.

    Raises:
        Exception: the one that ended a run.
    """
    open_corpus(next(iter(plans.values())).config, plans=[*plans.values()])
    wanted = [
        Wanted(name, plan, seed, 1, f"{name}-{seed}", {})
        for seed in seeds
        for name, plan in plans.items()
    ]
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in plans}
    pool = Pool(
        (device,),
        [*plans.values()],
        backend="torch",
        cache=cache_folder(),
        stop=StopRequest(),
        each=len(plans),
    )
    with pool:
        for made in pool.train(wanted, watch=lambda under_way, progress: None):
            if not isinstance(made.outcome, Trained):
                raise made.outcome
            run, (label, seed) = made.outcome, (made.wanted.label, made.wanted.seed)
            found[label][seed] = run.data()
            print(label, seed, run.steps, round(run.seconds, 2), run.val_loss, flush=True)
    return {name: [some[seed] for seed in sorted(some)] for name, some in found.items()}


if __name__ == "__main__":
    main()
