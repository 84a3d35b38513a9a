"""``minillm plan``: its options. The answer is in planning.py, which imports the planner."""

from __future__ import annotations

from typing import Annotated

from minillm_core.cli.options import AsJson, PlanOptions, examples, value

EXAMPLES = examples(
    "minillm plan --preset gpt2-124m",
    "minillm plan --plugins muon,paired_heads --json",
    "minillm plan --diff muon muon,paired_heads",
    "minillm plan --preset speedrun --diff '' -smear",
)


def plan(
    run: PlanOptions,
    diff: Annotated[
        tuple[str, str] | None,
        value("A,B C,D", "Compare the plans of two plugin sets; '' adds none, -NAME removes one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be trained and what it costs: size, FLOPs, memory, time, disk.

    Needs no GPU, trains nothing and writes nothing.
    """
    from minillm_core.cli.planning import answer

    answer(run.request(), diff, as_json=as_json)
