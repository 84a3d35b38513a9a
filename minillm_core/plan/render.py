"""The plan as a one-page table, and as a JSON document."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from minillm_core.config.schema import EvalConfig
from minillm_core.nn.block import Omitted
from minillm_core.nn.decoder import decoder
from minillm_core.nn.decoding import EVERYTHING
from minillm_core.nn.module import named_modules
from minillm_core.plan.estimate import Estimate
from minillm_core.plan.plan import OWN, Plan, as_json
from minillm_core.plan.slots import CORE, filled_slots, located
from minillm_core.plugins.builders.optimizer import FROZEN
from minillm_core.text import are, counted, listed, plain, rounded

SAMPLES = 200  # points at which a schedule is evaluated to find its peak


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the document of ``minillm plan --json``; only named plugins appear."""
    return {
        "plan": plan.data(),
        "plan_hash": plan.hash,
        "plugins": as_json(plan.plugins),
        "export": as_json(plan.export),
    }


def render_plan(
    plan: Plan, console: Console, dtype: str | None = None, costs: Sequence[tuple[str, str]] = ()
) -> None:
    """Print the plan.

    Args:
        plan: the plan.
        console: where to print.
        dtype: compute dtype for the bytes; default: from the settings.
        costs: pairs (heading, words) on the cost of the run on this machine.
    """
    estimate = plan.estimate(dtype)
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for fact in _facts(plan, estimate, costs):
        add_row(facts, *fact)
    console.print(facts)
    if plan.plugins:
        console.print()
        console.print(_plugins(plan, console))
    left, right = _parts(estimate), (_memory(estimate), _rules(plan, estimate), _schedules(plan))
    grid = Table.grid(padding=(0, 4, 0, 0))
    stack = [part for table in right for part in (table, Text())]
    grid.add_row(left, Group(*stack[:-1]))
    for table in [grid] if fits(grid, console) else [left, *right]:
        console.print()
        console.print(table)


def columns(*headings: str, names: int = 0) -> Table:
    """Return a table without lines; columns whose headings begin with ``>`` are right-aligned.

    Args:
        *headings: the headings of the columns.
        names: number of leading columns that hold names, which are never wrapped.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for i, heading in enumerate(headings):
        justify = "right" if heading.startswith(">") else "left"
        whole = i < names
        table.add_column(heading.lstrip(">"), justify=justify, overflow="fold", no_wrap=whole)
    return table


def amount(number: float) -> str:
    """Format 1,048,576 as 1.05 M."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def parameters_of(plan: Plan) -> str:
    """Format the number of parameters and, if some are frozen, of trained ones."""
    count, frozen = plan.num_parameters, plan.num_frozen
    held = f", {amount(count - frozen)} trained and {amount(frozen)} frozen" if frozen else ""
    return f"{amount(count)} parameters{held}"


def exportable(plan: Plan) -> str:
    """Return the layout in which the model can be exported, or the plugins that rule it out, in words."""
    export = plan.export
    verb = "has" if len(export.blocked_by) == 1 else "have"
    why = export.reason or f"{listed(export.blocked_by)} {verb} no equivalent elsewhere"
    if export.layout is None:
        return f"none: {why}"
    if export.layout == OWN:
        return f"a directory with its own modeling files: {why}"
    return f"a {export.layout} directory"


def sized(count: float) -> str:
    """Format bytes as MiB or GiB."""
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB"


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of untrusted text."""
    table.add_row(*(Text(plain(cell), style) for cell in cells))


def _facts(
    plan: Plan, estimate: Estimate, costs: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    config, train = plan.config, plan.config.train
    model = config.model
    yield "plan", f"{plan.hash[:12]}  preset {config.preset}"
    size = f"{parameters_of(plan)}, {counted(model.layers, 'layer')}, {model.dim} wide"
    tied = "tied" if model.tied else "untied"
    yield "model", f"{size}, vocabulary {model.vocab:,}, {tied} head"
    alike: dict[str, list[int]] = {}  # blocks under one heading
    for index in range(len(plan.spec.blocks)):
        alike.setdefault(_block(plan, index), []).append(index)
    for what, layers in alike.items():
        yield located(layers), what
    clipped = f"clipped to {train.clip:g}" if train.clip else "not clipped"
    for shape, steps in plan.course.items():
        yield (
            "step" if len(plan.course) == 1 else counted(steps, "step"),
            f"{shape.tokens:,} tokens = rows {shape.rows} x accumulate {shape.accumulate} x seq_len "
            f"{shape.seq_len}; {amount(estimate.flops_per_token * shape.tokens)}FLOP; "
            f"gradients {clipped}",
        )
    yield "run", _run(plan, estimate)
    yield from costs
    yield "evaluation", _evaluation(config.eval, best=config.checkpoint.best)
    yield "export", exportable(plan)
    for part, own in estimate.gathered.items():
        share = own * estimate.part(part).flops / max(estimate.flops_per_token, 1)
        yield part, f"{share:.0%} of the FLOPs at most: it is computed at supervised tokens alone"
    if plan.views:
        who = listed(sorted({f"'{view.owner}'" for view in plan.views.values()}))
        count, size = len(plan.views), sized(estimate.viewed)
        what = are(counted(count, "parameter"), count)
        yield "views", f"{what} evaluated by {who}: {size} more in a checkpoint"
    for table, (seen, count) in estimate.tables.items():
        yield "by rows", f"{table}: a step reads and updates {seen:,} of {count:,} rows at most"
    for path, node in named_modules(decoder(plan.spec)):
        if node.lookback == EVERYTHING and hasattr(node, "owner"):
            what = f"{path} of '{node.owner}' computes all columns again for each token of a text"
            yield "generation", f"{what}: lookback = EVERYTHING"
    for entry in estimate.uncounted:
        yield "not counted", f"FLOPs of the scores in {entry}"


def epochs_read(epochs: float) -> str:
    """Format how often a text is read: ``0.57 epochs``, ``1 epoch``."""
    return counted(epochs, "epoch", ".2g" if epochs < 10 else ",.0f")


def _run(plan: Plan, estimate: Estimate) -> str:
    train, parts = plan.config.train, []
    if train.steps is not None:
        tokens = train.steps * plan.tokens_per_step
        compute = amount(train.steps * estimate.flops_per_step)
        parts.append(f"{counted(train.steps, 'step')}, {amount(tokens)} tokens, {compute}FLOP")
    if train.minutes is not None:
        parts.append(counted(train.minutes, "minute", "g"))
    curve = plan.schedule.curve
    shape = f"{curve.owner if curve else train.schedule} after {train.warmup:.0%} warm-up"
    if train.schedule == "wsd" and not curve:
        shape += f", {train.cooldown:.0%} cooldown"
    return f"{' or '.join(parts)}; {shape}"


def _evaluation(settings: EvalConfig, *, best: bool) -> str:
    most = f"at the end, {settings.tokens:,} predictions at most (eval.tokens)"
    every, share = settings.every, 1.0 if best else settings.share  # best: of all predictions
    if every == 0:
        return most
    often = "sixth of the run" if every is None else "step" if every == 1 else f"{every:,} steps"
    fewer = f", {100 * share:.3g} % of them before the end" if share < 1 else ""
    return f"at the start, after every {often}, and {most}{fewer}"


def _block(plan: Plan, index: int) -> str:
    """Describe a layer: its sublayers, then the owners of its norms, residual sites, inputs and streams."""
    owners: dict[str, set[str]] = {}
    for report, holder in (one for one in plan.table.held() if int(one[0].order) == index):
        owners.setdefault(report.slot.partition("[")[0], set()).add(holder.owner)
    inside = {o for slot, those in owners.items() if slot.startswith("layers.") for o in those}
    attention = _place(plan, f"model.attention[{index}]", "attention", inside)
    parts = [attention, _place(plan, f"model.mlp[{index}]", "MLP")]
    for name in ("norm", "residual", "input", "streams"):
        parts += [f"{name} by {owner}" for owner in sorted(owners.get(f"model.{name}", ()))]
    return ", ".join(parts)


def _place(plan: Plan, slot: str, name: str, inside: Collection[str] = ()) -> str:
    """Describe a sublayer: the core's with the owners of its slots, a plugin's, or none."""
    (holder,) = plan.table[slot].held
    if holder.owner == CORE:
        return f"{holder.what} with {', '.join(sorted(inside))}" if inside else holder.what
    if isinstance(holder.value, Omitted):
        return f"no {name} ({holder.owner})"
    return f"{holder.what.partition('(')[0]} ({holder.owner})"


def _plugins(plan: Plan, console: Console) -> Table:
    """Return a table of the slots that plugins fill; names too long to fit beside their plugin go below it."""
    versions = {plain(p.name): p.version for p in plan.plugins}
    wide = columns("plugin", "slot", "where", "what", names=3)
    narrow = columns("plugin, slot", "where", "what", names=2)
    last = None
    for entry in filled_slots(plan):
        begins, last = entry.owner != last, entry.owner
        name = f"{entry.owner} {versions.get(entry.owner) or ''}" if begins else ""
        add_row(wide, name, entry.slot, entry.where, rounded(entry.what))
        if begins:
            narrow.add_row(Text(plain(name), "bold"))
        rest = (Text(plain(cell)) for cell in (entry.where, rounded(entry.what)))
        narrow.add_row(Text(f"  {plain(entry.slot)}"), *rest)
    return wide if fits(wide, console) else narrow


def fits(table: Table, console: Console) -> bool:
    """Return whether the table fits without wrapping a line."""
    anywhere = console.options.update(max_width=10_000)
    return console.measure(table, options=anywhere).maximum <= console.width


def _parts(estimate: Estimate) -> Table:
    table = columns("part", ">parameters", ">", ">FLOP/token", ">")
    table.show_footer = True
    parameters, flops = max(estimate.parameters, 1), max(estimate.flops_per_token, 1)
    for part in estimate.parts:
        share, work = f"{part.parameters / parameters:.0%}", f"{part.flops / flops:.0%}"
        add_row(table, part.name, f"{part.parameters:,}", share, amount(part.flops), work)
    totals = ("all", f"{estimate.parameters:,}", "", amount(estimate.flops_per_token), "")
    for column, total in zip(table.columns, totals, strict=True):
        column.footer = total
    return table


def _memory(estimate: Estimate) -> Table:
    table = columns(f"bytes in {estimate.dtype}", ">about")
    for name, count in estimate.memory.items():
        if count:
            add_row(table, name, sized(count))
    add_row(table, "all", sized(estimate.bytes))
    return table


def _rules(plan: Plan, estimate: Estimate) -> Table:
    table = columns("rule", "stages", ">arrays", ">parameters")
    for cost in estimate.rules:
        stages = ", ".join(anchor for anchor, _, _ in plan.rules[cost.name].stages)
        add_row(table, cost.name, stages, f"{cost.arrays:,}", f"{cost.parameters:,}")
    if plan.frozen:
        add_row(table, FROZEN, "not trained", f"{len(plan.frozen):,}", f"{estimate.frozen:,}")
    return table


def _schedules(plan: Plan) -> Table:
    table = columns("value", "owner", ">start", ">peak", ">end")
    steps = plan.config.train.steps or SAMPLES
    places = [1 / steps, *((i + 1) / SAMPLES for i in range(SAMPLES))]
    for name, (owner, schedule) in plan.schedules.items():
        numbers = [schedule.at(place, plan.schedule) for place in places]
        figures = (numbers[0], max(numbers), numbers[-1])
        add_row(table, name, owner, *(f"{number:.3g}" for number in figures))
    return table
