"""``minillm plan``: its options. The implementation is in planning.py, which imports the planner."""

from __future__ import annotations

from dataclasses import dataclass

from minillm_core.cli.options import AsJson, PlanOptions, examples, option

EXAMPLES = examples(
    "minillm plan --preset gpt2-124m",
    "minillm plan --plugins muon,paired_heads --json",
    "minillm plan --diff muon muon,paired_heads",
    "minillm plan --preset speedrun --diff '' -backout",
    "minillm plan --preset gpt2-124m --plugins muon --gpus 8 --card h100",
)


@dataclass(frozen=True)
class PlanOutput:
    """The options that select the output of ``minillm plan``."""

    diff: tuple[str, str] | None = option(
        "A,B C,D", "Compare the plans of two plugin sets; '' adds none, -NAME removes one."
    )
    gpus: int | None = option(
        "N", "Show how N GPUs would share the training, and what their communication costs.", min=1
    )
    card: str | None = option(
        "NAME[,KEY=NUMBER]",
        "GPU for --gpus: h200, h100, b200, a100, l40s or rtx4090, optionally with figures of your "
        "own (h100,utilisation=0.5,network=25e9). Default: h200.",
    )


def plan(run: PlanOptions, shown: PlanOutput, as_json: AsJson = False) -> None:
    """Show what would be trained and what it costs: size, FLOPs, memory, time, disk.

    Needs no GPU, trains nothing and writes nothing.
    """
    from minillm_core.cli.planning import answer

    answer(run.request(), shown, as_json=as_json)
