"""``minillm plugins why``: its options. The implementation is in slot_answers.py, which imports the planner."""

from __future__ import annotations

from typing import Annotated

import typer

from minillm_core.cli.options import AsJson, LeaveOut, RunOptions, examples, switch

EXAMPLES = examples(
    "minillm plugins why attn.qk --plugins qk_norm,paired_heads",
    "minillm plugins why layers.2.* --plugins muon,paired_heads",
    "minillm plugins why layers.0.attention.q.weight --plugins muon",
    "minillm plugins why opt --preset speedrun --all",
    "minillm plugins why linear_cross_entropy --device cpu --json",
)


def why_command(
    slot: Annotated[
        str,
        typer.Argument(
            metavar="SLOT",
            help="A slot, parameter, rule or op, or a prefix of one; * matches any text: attn.*, "
            "model.mlp[3], opt.rule\\[muon].",  # escaped: this is rich's markup
        ),
    ],
    run: Annotated[RunOptions, LeaveOut("prompts branch memory")],
    everything: Annotated[
        bool, switch("--all", "Show every parameter's defaults as well, as --json does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which plugin fills a slot, why, and what conflicts with it. Exit 2: a conflict."""
    from minillm_core.cli.slot_answers import answer

    answer(slot, run.request(), everything=everything, as_json=as_json)
