"""What ``minillm plugins why SLOT`` says: who owns it and why, who was refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minillm_core.backends.why import kernel_answers
from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, prepare
from minillm_core.errors import PlanError, Refusal
from minillm_core.plan import build_plan
from minillm_core.plan.build import geometry_of
from minillm_core.plan.declared import Declared
from minillm_core.plan.render import columns
from minillm_core.plan.why import Answer, Folded, Pattern, folded, nearest_names, slot_answers
from minillm_core.text import plain, rounded

if TYPE_CHECKING:
    from minillm_core.plugins.manager import LoadedPlugin

__all__ = ["show_table", "show_why"]


def show_why(asked: Asked, slot: str, *, json: bool, everything: bool = False) -> None:
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
    said, plan, refusal = Declared.of(config, geometry_of(config)), None, None
    try:
        plan = build_plan(config, prepared.plugins, said)
    except PlanError as error:
        refusal = error
    answers = slot_answers(said, plan, refusal, [plugin.name for plugin in prepared.plugins])
    if plan is not None:
        answers += kernel_answers(plan, prepared.detected)
    chosen = folded(_chosen(slot, answers, refusal))
    clashes = [(each, one) for each in chosen for one in each.answer.clashes]
    if refusal and not clashes:
        say(f"note: the plan is refused elsewhere: {refusal.what}")
    if json:
        emit(_document(slot, chosen, prepared.plugins, refusal))
    else:
        shown = chosen if everything else _notable(chosen)
        _render(shown, prepared.plugins)
        if hidden := len(chosen) - len(shown):
            say(f"note: {hidden} defaults that no plugin claims are not shown: --all shows them")
    if clashes:
        (first, clash), *_ = clashes
        raise PlanError(clash.what, where=_place(first), fix=clash.fix)


def _chosen(slot: str, answers: Sequence[Answer], refusal: PlanError | None) -> list[Answer]:
    pattern = Pattern(slot)
    chosen = [answer for answer in answers if pattern.picks(answer)]
    if chosen:
        return chosen
    if refusal:
        raise refusal
    near = nearest_names(slot, answers)
    raise Refusal(
        f"this plan has no slot, parameter, rule or op '{plain(slot)}'",
        where="minillm plugins why",
        fix=f"did you mean {' or '.join(near)}?" if near else "minillm plugins why '*' shows all",
    )


def _notable(chosen: list[Folded]) -> list[Folded]:
    """Without what is as it is everywhere, unless nothing else was asked for."""
    return [one for one in chosen if not one.answer.usual] or chosen


def _document(
    slot: str,
    chosen: Sequence[Folded],
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


def _render(chosen: Sequence[Folded], plugins: Sequence[LoadedPlugin]) -> None:
    versions = {plugin.name: plugin.version for plugin in plugins}
    table = columns("slot", "where", "owner", "what", "why")
    for one in chosen:
        place = (_short(one), one.where)
        for held in one.answer.held:
            owner = f"{held.owner} {versions.get(held.owner) or ''}".strip()
            _row(table, *place, owner, rounded(held.what), held.why)
            place = ("", "")
        for refused in one.answer.refused:
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


def _place(one: Folded) -> str:
    return ", ".join(filter(None, (_short(one), one.where)))


def _short(one: Folded) -> str:
    """As people name it: attn.qk.norm, model.mlp, model.residual[in][x0]."""
    bare = one.slot.replace("layers.*.", "").replace("[*]", "")
    if one.answer.kind != "parameter" and bare.startswith("attention."):
        return f"attn.{bare.removeprefix('attention.')}"
    return bare
