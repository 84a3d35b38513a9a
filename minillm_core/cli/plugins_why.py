"""``minillm plugins why``: which plugin fills a slot, why, and what conflicts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minillm_core.backends.bind import kernel_answers
from minillm_core.cli.console import emit, say
from minillm_core.cli.options import AsJson, RunOptions, Without, switch
from minillm_core.errors import PlanError, Refusal
from minillm_core.plan import build_plan
from minillm_core.plan.render import columns
from minillm_core.plan.slots import SlotState
from minillm_core.plan.why import SlotGroup, SlotReport, grouped, nearest_names, picks, slot_reports
from minillm_core.text import plain, rounded
from minillm_core.train.request import RunRequest, prepare

if TYPE_CHECKING:
    from minillm_core.plugins.manager import LoadedPlugin

EXAMPLES = """Examples:

minillm plugins why attn.qk --plugins qk_norm,paired_heads

minillm plugins why layers.2.* --plugins muon,paired_heads

minillm plugins why layers.0.attention.q.weight --plugins muon

minillm plugins why opt --preset speedrun --all

minillm plugins why linear_cross_entropy --device cpu --json
"""


def why_command(
    slot: Annotated[
        str,
        typer.Argument(
            metavar="SLOT",
            help="A slot, parameter, rule or op, or its beginning; * is any text: attn.*, "
            "model.mlp[3], opt.rule\\[muon].",  # escaped: this is rich's markup
        ),
    ],
    run: Annotated[RunOptions, Without("prompts branch")],
    everything: Annotated[
        bool, switch("--all", "Show every parameter's defaults as well, as --json does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which plugin fills a slot, why, and what conflicts with it. Exit 2: a conflict."""
    show_why(run.request(), slot, json=as_json, everything=everything)


def show_why(asked: RunRequest, slot: str, *, json: bool, everything: bool = False) -> None:
    """Write the answer to stdout: a table, or one JSON document.

    Args:
        asked: the command line of the run.
        slot: what is asked about.
        json: write the document, which holds everything.
        everything: the table holds the usual as well: what nobody says anything of.

    Raises:
        Refusal: nothing is called that; or, after the answer was written, a clash in it.
        PlanError: the plan is refused before the slot is reached.
    """
    prepared = prepare(asked, to_run=False)
    config = prepared.loaded.config
    state, plan, refusal = SlotState.of(config), None, None
    try:
        plan = build_plan(config, prepared.plugins, state)
    except PlanError as error:
        refusal = error
    reports = slot_reports(state, plan, refusal, [plugin.name for plugin in prepared.plugins])
    if plan is not None:
        reports += kernel_answers(plan, prepared.detected)
    chosen = grouped(_chosen(slot, reports, refusal))
    clashes = [(each, one) for each in chosen for one in each.report.clashes]
    if refusal and not clashes:
        say(f"note: the plan is refused elsewhere: {refusal.what}")
    if json:
        emit(_document(slot, chosen, prepared.plugins, refusal))
    else:
        shown = chosen if everything else _notable(chosen)
        _render(shown, prepared.plugins)
        if hidden := len(chosen) - len(shown):
            say(f"note: {hidden} defaults that no plugin claims are hidden; --all shows them")
    if clashes:
        (first, clash), *_ = clashes
        raise PlanError(clash.what, where=_place(first), fix=clash.fix)


def _chosen(
    slot: str, reports: Sequence[SlotReport], refusal: PlanError | None
) -> list[SlotReport]:
    chosen = [report for report in reports if picks(slot, report)]
    if chosen:
        return chosen
    if refusal:
        raise refusal
    near = nearest_names(slot, reports)
    raise Refusal(
        f"this plan has no slot, parameter, rule or op '{plain(slot)}'",
        where="minillm plugins why",
        fix=f"did you mean {' or '.join(near)}?" if near else "minillm plugins why '*' shows all",
    )


def _notable(chosen: list[SlotGroup]) -> list[SlotGroup]:
    """Without what is as it is everywhere, unless nothing else was asked for."""
    return [one for one in chosen if not one.report.usual] or chosen


def _document(
    slot: str,
    chosen: Sequence[SlotGroup],
    plugins: Sequence[LoadedPlugin],
    refusal: PlanError | None,
) -> dict[str, object]:
    return {
        "asked": slot,
        "answers": [one.data() for one in chosen],
        "plugins": {
            p.name: {"distribution": p.distribution, "version": p.version} for p in plugins
        },
        "plan_refused": refusal and {"what": refusal.what, "where": refusal.where},
    }


def _render(chosen: Sequence[SlotGroup], plugins: Sequence[LoadedPlugin]) -> None:
    versions = {plugin.name: plugin.version for plugin in plugins}
    table = columns("slot", "where", "owner", "what", "why")
    for one in chosen:
        place = (_short(one), one.where)
        for held in one.report.held:
            owner = f"{held.owner} {versions.get(held.owner) or ''}".strip()
            _row(table, *place, owner, rounded(held.what), held.why)
            place = ("", "")
        for refused in one.report.refused:
            style = "red" if refused.how == "clash" else "dim"
            how = "closed by" if refused.how == "closed" else refused.how
            _row(table, *place, how, ", ".join(refused.who), refused.what, style=style)
            place = ("", "")
    console = Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000)
    show_table(table, console)


def show_table(table: Table, console: Console) -> None:
    """Print it; where it is too wide, an entry on lines of its own, so that no name is cut."""
    anywhere = console.options.update(max_width=10_000)
    if console.measure(table, options=anywhere).maximum <= console.width:
        console.print(table)
        return
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for slot, where, *told in rows:
        if str(slot):
            console.print(Text("  ").join(filter(None, (slot, where))), style="bold")
        console.print(Padding(Text("  ").join(filter(None, told)), (0, 0, 0, 4)))


def _row(table: Table, *cells: str, style: str = "") -> None:
    table.add_row(*(Text(plain(cell), style) for cell in cells))


def _place(one: SlotGroup) -> str:
    return ", ".join(filter(None, (_short(one), one.where)))


def _short(one: SlotGroup) -> str:
    """As people name it: attn.qk.norm, model.mlp, model.residual[in][x0]."""
    bare = one.slot.replace("layers.*.", "").replace("[*]", "")
    if one.report.kind != "parameter" and bare.startswith("attention."):
        return f"attn.{bare.removeprefix('attention.')}"
    return bare
