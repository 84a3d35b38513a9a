"""The implementation of ``minillm plugins why``: the plugin in a slot, the reason, and the conflicts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minillm_core.backends.bind import kernel_answers
from minillm_core.cli.console import emit, say
from minillm_core.errors import PlanError, Refusal
from minillm_core.plan import build_plan, why
from minillm_core.plan.render import add_row, columns, fits
from minillm_core.plan.slots import SlotState
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.text import plain, rounded
from minillm_core.train.request import RunRequest, prepare


def answer(slot: str, asked: RunRequest, *, everything: bool, as_json: bool) -> None:
    """Print the plugin that fills a slot of a run's plan, the reason, and the conflicts."""
    prepared = prepare(asked, to_run=False)
    config = prepared.loaded.config
    state, plan, refusal = SlotState.of(config), None, None
    try:
        plan = build_plan(config, prepared.plugins, state)
    except PlanError as error:
        refusal = error
    reports = why.slot_reports(state, plan, refusal, [plugin.name for plugin in prepared.plugins])
    if plan is not None:
        reports += kernel_answers(plan, prepared.detected)
    chosen = why.grouped(_chosen(slot, reports, refusal))
    clashes = [(each, one) for each in chosen for one in each.report.clashes]
    if refusal and not clashes:
        say(f"note: the plan is refused elsewhere: {refusal.what}")
    if as_json:
        emit(
            {
                "asked": slot,
                "answers": [one.data() for one in chosen],
                "plugins": {
                    plugin.name: {"distribution": plugin.distribution, "version": plugin.version}
                    for plugin in prepared.plugins
                },
                "plan_refused": refusal and {"what": refusal.what, "where": refusal.where},
            }
        )
    else:
        notable = [one for one in chosen if everything or not one.report.usual] or chosen
        _render(notable, prepared.plugins)
        if hidden := len(chosen) - len(notable):
            say(f"note: {hidden} defaults that no plugin claims are hidden; --all shows them")
    if clashes:
        (first, clash), *_ = clashes
        where = ", ".join(filter(None, (_short(first), first.where)))
        raise PlanError(clash.what, where=where, fix=clash.fix)


def _chosen(
    slot: str, reports: Sequence[why.SlotReport], refusal: PlanError | None
) -> list[why.SlotReport]:
    if chosen := [report for report in reports if why.matches(slot, report)]:
        return chosen
    if refusal:
        raise refusal
    near = why.nearest_names(slot, reports)
    raise Refusal(
        f"this plan has no slot, parameter, rule or op '{plain(slot)}'",
        where="minillm plugins why",
        fix=f"did you mean {' or '.join(near)}?" if near else "minillm plugins why '*' shows all",
    )


def _render(chosen: Sequence[why.SlotGroup], plugins: Sequence[LoadedPlugin]) -> None:
    versions = {plugin.name: plugin.version for plugin in plugins}
    table = columns("slot", "where", "owner", "what", "why")
    for one in chosen:
        place = (_short(one), one.where)
        for held in one.report.held:
            owner = f"{held.owner} {versions.get(held.owner) or ''}".strip()
            add_row(table, *place, owner, rounded(held.what), held.why)
            place = ("", "")
        for refused in one.report.refused:
            style = "red" if refused.how == "clash" else "dim"
            how = "closed by" if refused.how == "closed" else refused.how
            add_row(table, *place, how, ", ".join(refused.who), refused.what, style=style)
            place = ("", "")
    console = Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000)
    show_table(table, console)


def show_table(table: Table, console: Console) -> None:
    """Print a table; if it is too wide, print each entry on several lines, so that no name is cut."""
    if fits(table, console):
        console.print(table)
        return
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for slot, where, *told in rows:
        if str(slot):
            console.print(Text("  ").join(filter(None, (slot, where))), style="bold")
        console.print(Padding(Text("  ").join(filter(None, told)), (0, 0, 0, 4)))


def _short(one: why.SlotGroup) -> str:
    """Return a slot's short name as in builders: attn.qk.norm, model.mlp, model.residual[in][x0]."""
    bare = one.slot.replace("layers.*.", "").replace("[*]", "")
    if one.report.kind != "parameter" and bare.startswith("attention."):
        return f"attn.{bare.removeprefix('attention.')}"
    return bare
