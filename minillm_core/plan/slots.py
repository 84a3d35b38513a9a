"""The slot table: every slot of a plan, the plugin that fills it and why, and the conflicts.

The table is built once while resolving, from the slots that the builders declare. The listings of ``plan``
and ``plugins why``, the check of the nodes' inputs, the nodes to build and the evidence expected of a run
are all read from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from minillm_core.config.schema import Config
from minillm_core.errors import PlanError
from minillm_core.nn.attention import DocumentMask, Masks
from minillm_core.nn.block import Omitted
from minillm_core.nn.decoder import Gathering, Loop, RowChoice, Target, Term
from minillm_core.nn.init import Init
from minillm_core.nn.node import ModelShape, Node, Setting, inputs_of
from minillm_core.nn.reference import Function
from minillm_core.nn.residual import Learned
from minillm_core.ops.select import Candidate
from minillm_core.optim.schedules import Piecewise, Plateaus
from minillm_core.optim.stage import ANCHORS, Draft, Stage
from minillm_core.plugins import builders
from minillm_core.plugins.builders.base import Builder, ValueTable
from minillm_core.plugins.builders.optimizer import DEFAULT_RULE, FROZEN, ChainedStage
from minillm_core.plugins.hookspecs import HOOKS
from minillm_core.plugins.slots import AFTER, Chain, Claim, Link, Slot, Terms, slots_in
from minillm_core.plugins.sourcing import Field, Reserved, Sourcing
from minillm_core.text import counted, plain

if TYPE_CHECKING:
    from minillm_core.plan.plan import Plan
    from minillm_core.plugins.manager import Manager

T = TypeVar("T", bound=Hashable)

LAYER = re.compile(r"(?:(?<=layers\.)|(?<=blocks\.)|(?<=attention\[)|(?<=mlp\[))\d+")
"""The layer index in the name of a slot or a parameter."""

CORE = "core"
NOTHING = "nothing"
UNCLAIMED = "the default: no plugin claims it"

USUAL = {"lr_mul": 1.0, "wd_mul": 1.0, "betas": None}
"""The default values of a parameter, used if neither its module nor a plugin sets any."""


@dataclass
class SlotState:
    """The unresolved slots while the hooks fill them; kept if planning is refused."""

    attention: tuple[builders.AttentionSlots, ...]  # one per layer
    model: builders.ModelSlots
    loss: builders.LossSlots
    data: builders.DataSlots
    values: ValueTable = field(default_factory=ValueTable)
    optimizer: builders.OptimizerSlots | None = None  # exists once the model is resolved
    kernels: dict[str, tuple[str, Candidate]] = field(default_factory=dict)  # op=name -> offer
    layered: set[str] = field(default_factory=set)  # plugins with an option of type Layers
    called: set[str] = field(default_factory=set)  # hooks that were called for every plugin

    @classmethod
    def of(cls, config: Config) -> SlotState:
        """Return empty slots for the configured model."""
        shape = config.model.model_dump(exclude={"tied", "rope_base"})
        shape |= {"head_dim": config.model.head_width, "positions": config.train.seq_len}
        geometry, base, layered = ModelShape(**shape), config.model.rope_base, set[str]()
        layers = (replace(geometry, layer=i) for i in range(geometry.layers))
        attention = tuple(builders.AttentionSlots(layer, base, layered) for layer in layers)
        model, row = builders.ModelSlots(geometry, base, layered), config.train.seq_len
        data = builders.DataSlots(config)
        loss = builders.LossSlots(row, config.train.rows, geometry.dim)
        return cls(attention, model, loss, data, layered=layered)

    def fill(self, manager: Manager, hook: str, builder: type[Builder], *slots: Any) -> None:
        """Call a hook of every plugin, once per entry of ``slots``, with a builder for it."""
        (argument,) = HOOKS[hook]
        for one in slots:
            manager.call(hook, lambda p, one=one: {argument: builder(p.name, self.values, one)})
        self.called.add(hook)

    def parts(self) -> Iterator[tuple[set[str], tuple[SlotReport, ...]]]:
        """Yield (hooks, reports): the reports are final after these hooks; the optimizer's are last."""
        attention = _attention_reports(self.attention, self.model)
        yield {"build_attention", "build_model"}, tuple(attention)
        yield {"build_model"}, tuple(_reports(self.model))
        yield {"compute_loss"}, tuple(_reports(self.loss))
        yield {"build_data"}, tuple(_reports(self.data))
        if self.optimizer is not None:
            yield {"optimizer_factory"}, tuple(optimizer_reports(self.optimizer, self.model))

    def table(self) -> SlotTable:
        """Build the table of all slots so far."""
        return SlotTable(one for _, reports in self.parts() for one in reports)


@dataclass(frozen=True)
class Holder:
    """One entry in a slot: the core's default, or a plugin's."""

    owner: str  # core, or a plugin
    what: str  # a class, a function, a number, or the core's default in words
    why: str
    value: Any = field(default=None, compare=False, repr=False)
    """A plugin's object that takes part in the run; None if there is none."""
    inputs: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The batch fields, streams, taps and schedule values that it reads, sorted."""
    evidence: str = field(default="", compare=False, repr=False)
    """The evidence in a run that it took part, if it is neither a node nor a parameter."""

    @property
    def node(self) -> Node | None:
        """The module of the entry, or the module that computes it."""
        node = getattr(self.value, "node", self.value)
        return node if isinstance(node, Node) else None

    @property
    def settled(self) -> bool:
        """Whether it needs no evidence: no code runs for it, so it holds once planned."""
        return not isinstance(self.value, (Init, Draft, ChainedStage, Learned)) and (
            self.node is None and not getattr(self.value, "emitted", None) and not self.evidence
        )


@dataclass(frozen=True)
class Refused:
    """A conflict in a slot, a slot that is closed, or a kernel that does not serve."""

    who: tuple[str, ...]  # plugins in conflict, sorted; who closed it; or the candidate
    what: str
    fix: str | None = None
    how: str = "clash"  # "clash": the plan is refused; else "closed", "cannot serve", "passed over"


@dataclass(frozen=True)
class SlotReport:
    """One row of the table: a slot, a parameter or an op."""

    slot: str  # layers.0.attention.qk.norm, model.residual[final][x0], kernel[attention]
    kind: str  # claim, chain, term, query, parameter
    held: tuple[Holder, ...]  # in the order in which they run
    refused: tuple[Refused, ...] = ()
    also: tuple[str, ...] = ()  # further names that find it
    usual: bool = False  # it has the defaults of a parameter that no plugin and no module changes
    order: float = field(default=AFTER, compare=False, repr=False)
    """Position in a step: see :class:`Slot`."""
    shapes: bool = field(default=False, compare=False, repr=False)
    """Whether it changes the function of the model."""
    heading: str = field(default="", compare=False, repr=False)
    """The heading under which a plan counts it with others; empty: it is listed itself."""

    @property
    def clashes(self) -> tuple[Refused, ...]:
        """The conflicts for which the plan is refused."""
        return tuple(one for one in self.refused if one.how == "clash")

    def data(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "slot": self.slot,
            "kind": self.kind,
            "held": [{"owner": h.owner, "what": h.what, "why": h.why} for h in self.held],
            "refused": [asdict(one) for one in self.refused],
            "usual": self.usual,
        }


@dataclass(frozen=True, order=True)
class Placement:
    """A slot that a plugin fills."""

    owner: str
    slot: str  # layers.3.attention.layout, opt.rule[muon].scale
    what: str  # class, function or number
    settled: bool = False  # no code runs for it: it holds once planned
    shapes: bool = True  # it changes the function of the model


class SlotTable:
    """Every slot of a plan as a report, by its name."""

    def __init__(self, reports: Iterable[SlotReport]) -> None:
        self.reports = tuple(reports)
        self._named = {report.slot: report for report in self.reports}

    def __iter__(self) -> Iterator[SlotReport]:
        return iter(self.reports)

    def __getitem__(self, slot: str) -> SlotReport:
        return self._named[slot]

    def held(self, order: float | None = None) -> Iterator[tuple[SlotReport, Holder]]:
        """Yield the plugins' entries that take part in the run; with ``order``, only those at that position."""
        for report in self.reports:
            if report.kind != "parameter" and order in (None, report.order):
                yield from ((report, h) for h in report.held if h.value is not None)

    def nodes(self) -> Iterator[tuple[Node, int | None]]:
        """Yield each node with its layer, in the order of a step."""
        for report, holder in sorted(self.held(), key=lambda pair: pair[0].order):
            if holder.node is not None:
                yield holder.node, int(report.order) if 0 <= report.order < AFTER else None

    def placements(self) -> Iterator[Placement]:
        """Yield each slot with each plugin that fills it; claims on parameters are counted together."""
        counts: Counter[tuple[str, str]] = Counter()
        for report, h in self.held():
            if report.heading:
                counts[h.owner, report.heading] += 1
            else:
                yield Placement(h.owner, report.slot, words(h.value), h.settled, report.shapes)
        for (owner, slot), count in sorted(counts.items()):
            yield Placement(owner, slot, counted(count, "parameter"), settled=True, shapes=False)

    def evidence(self, owner: str) -> Iterator[str]:
        """Yield the evidence of a plugin other than its nodes and parameters."""
        found = [h.evidence for _, h in self.held() if h.owner == owner and h.evidence]
        inits = [key for key in found if key.startswith("init:")]
        yield from (*sorted(inits), *(key for key in found if key not in inits))


def _reports(kept: object) -> Iterator[SlotReport]:
    """Yield a report of every slot declared in an object."""
    for slot in slots_in(kept):
        if isinstance(slot, Claim):
            yield _claim(slot)
        elif isinstance(slot, Chain):
            yield from _chain(slot)
        elif isinstance(slot, Terms):
            yield from _terms(slot)


def _entry(slot: Slot, owner: str, value: Any, why: str, **more: Any) -> Holder:
    """Return a plugin's entry in a slot."""
    inputs = {*inputs_of(value), *more.pop("inputs", ())}
    listed = value if slot.listed else None
    more = {"what": words(value), "value": listed, "inputs": tuple(sorted(inputs))} | more
    return Holder(owner, why=why, **more)


def _report(kept: Slot, kind: str, held: Iterable[Holder], **changed: Any) -> SlotReport:
    """Return the report of a slot from its declaration, with the given fields changed."""
    facts: dict[str, Any] = {"slot": kept.where}
    facts |= {name: getattr(kept, name) for name in ("also", "order", "shapes", "heading")}
    return SlotReport(kind=kind, held=tuple(held), **facts | changed)


def _claim(claim: Claim[Any], default: str = "", **changed: Any) -> SlotReport:
    """Return a report of a slot's claimants, or of the core's default (``default``, or the declared one)."""
    entries, evidence = sorted(claim.held.items()), changed.pop("evidence", claim.evidence)
    held = [_entry(claim, *entry, "claims it", evidence=evidence) for entry in entries]
    refused: tuple[Refused, ...] = ()
    try:
        claim.resolve()
    except PlanError as error:
        refused = (Refused(tuple(sorted(claim.held)), error.what, error.fix),)
    held = held or [Holder(CORE, default or claim.default, UNCLAIMED)]
    return _report(claim, "claim", held, refused=refused, **changed)


def _chain(chain: Chain) -> Iterator[SlotReport]:
    """Yield a report per anchor, its nodes in the order in which they run."""
    error: PlanError | None = None
    try:
        order = [node.name for _, node in chain.resolve()]
    except PlanError as caught:
        error, order = caught, sorted({link.node.name for link in chain.links})
    for anchor in chain.anchors:
        slot = f"{chain.where}.{anchor}"
        here = [link for link in chain.links if link.anchor == anchor]
        here.sort(key=lambda link: order.index(link.node.name))
        held = [_entry(chain, li.node.owner, li.node, _standing(li, here)) for li in here]
        core = Holder(CORE, NOTHING, "the default: no plugin joins here")
        closed = chain.closed.get(anchor, [])
        refused = [Refused((owner,), reason, how="closed") for owner, reason in closed]
        if error is not None and here and error.where in (chain.where, slot):
            who = {link.node.owner for link in here} | {owner for owner, _ in closed}
            refused.append(Refused(tuple(sorted(who)), error.what, error.fix))
        yield _report(chain, "chain", held or [core], slot=slot, refused=tuple(refused))


def _standing(link: Link, here: list[Link]) -> str:
    """Explain the position of a node among the nodes at its anchor."""
    present = {other.node.name for other in here} - {link.node.name}
    reasons = [f"before '{name}', as it states" for name in link.before if name in present]
    reasons += [f"after '{name}', as it states" for name in link.after if name in present]
    for other in here:
        if link.node.name in other.after:
            reasons.append(f"before '{other.node.name}', as that states")
        if link.node.name in other.before:
            reasons.append(f"after '{other.node.name}', as that states")
    return f"joins at {link.anchor}" + "".join(f"; {reason}" for reason in reasons)


def _terms(terms: Terms[Any]) -> Iterator[SlotReport]:
    """Yield a report per key, the core's keys first; or one of the whole sum if it is not keyed."""

    def report(key: str | None, *held: Holder) -> SlotReport:
        slot = terms.where if key is None else f"{terms.where}[{key}]"
        also = () if key is None else tuple(f"{name}[{key}]" for name in terms.also)
        order = terms.times.get(key, terms.order)
        return _report(terms, terms.kind, held, slot=slot, also=also, order=order)

    if not terms.keyed:
        held = []
        for key, owner, value in terms.resolve():
            one = _entry(terms, owner, value, "adds it")
            held.append(one if str(key) == owner else replace(one, what=f"{key}: {one.what}"))
        core = Holder(CORE, terms.default, "the default: no plugin adds anything")
        yield report(None, *(held or (core,)))
        return
    found: dict[str, list[tuple[str, Any]]] = {}
    for key, owner, value in terms.resolve():
        found.setdefault(str(key), []).append((owner, value))
    for key in dict.fromkeys((*terms.always, *found)):
        if key in found:
            reads = () if terms.kind == "term" or key in ("carry", "sublayer") else (key,)
            why = terms.why if isinstance(terms.why, str) else terms.why(key)
            yield report(key, *(_entry(terms, *one, why, inputs=reads) for one in found[key]))
        else:
            why = "the main target, always there" if terms.kind == "term" else UNCLAIMED
            yield report(key, Holder(CORE, terms.always[key], why))
    if not (found or terms.always):
        yield report(None, Holder(CORE, terms.default, UNCLAIMED))


def _attention_reports(
    layers: Iterable[builders.AttentionSlots], model: builders.ModelSlots
) -> Iterator[SlotReport]:
    """Yield reports of every slot of every layer's attention, replaced attentions included."""
    for layer, slots in enumerate(layers):
        whole = model.sublayer["attention", layer].held
        kept = {getattr(slots, name).where for one in whole.values() for name in masks_of(one)}
        for report in _reports(slots):
            gone = whole and report.slot not in kept
            yield _replaced(report, layer, min(whole)) if gone else report


def masks_of(attention: Any) -> set[str]:
    """Return the slots of a layer that a plugin's whole attention reads: window, documents."""
    return {*vars(Masks())}.intersection(attention.reads if isinstance(attention, Node) else ())


def _replaced(report: SlotReport, layer: int, owner: str) -> SlotReport:
    """Return the empty report of a slot whose layer's attention ``owner`` replaces or leaves out.

    Plugins with layers="all" apply to the other layers: no conflict; minillm_core.plan.build refuses the rest.
    """
    gone = Holder(owner, NOTHING, f"replaces the whole attention of layer {layer}")
    return SlotReport(report.slot, report.kind, (gone,))


def optimizer_reports(
    slots: builders.OptimizerSlots, model: builders.ModelSlots
) -> Iterator[SlotReport]:
    """Yield reports of the rules with their stages, then of each parameter and the claims on it."""
    if slots.schedule.held:
        yield _claim(slots.schedule, shapes=False)
    rules = (slots.assigned[name].held.values() for name in slots.parameters)
    followers = Counter(next(iter(held), DEFAULT_RULE) for held in rules)
    for name in sorted(slots.rules):
        count = followers[name]
        what = "1 parameter follows it" if count == 1 else f"{count} parameters follow it"
        provider = Holder(slots.rules[name][0], what, "provides it")
        yield SlotReport(f"opt.rule[{name}]", "claim", (provider,), also=(name,))
        yield from _stages(name, slots, followed=count > 0)
    if slots.rates.held:
        yield _claim(slots.rates)
    for info in slots.parameters.values():
        claims = tuple(_parameter_claims(info, slots, model))
        yield _parameter(info, claims, model)
        yield from claims


def _stages(name: str, slots: builders.OptimizerSlots, *, followed: bool) -> Iterator[SlotReport]:
    """Yield reports of the stages of a rule, in order: the provider's, the core's, or an extension's."""
    owner, drafts = slots.rules[name]
    for report in _chain(slots.chain(name)) if slots.chain(name).links else ():
        seen = [(one, f"stage:{name}.{one.value.anchor}") for one in report.held]
        held = (replace(h, evidence=e, value=h.value if followed else None) for h, e in seen)
        yield replace(report, held=tuple(held))
    for anchor in ANCHORS:
        draft = drafts.get(anchor)
        why = f"a stage of the rule that {'the core' if owner == CORE else owner} provides"
        slot, evidence = f"opt.rule[{name}].{anchor}", f"stage:{name}.{anchor}"
        try:
            extension = slots.extension(name, anchor)
        except PlanError as error:
            yield SlotReport(slot, "claim", (), (Refused((), error.what, error.fix),))
            continue
        if extension.held:
            instead = f"extends the rule, in place of {words(draft)}" if draft else "extends it"
            report = _claim(extension, slot=slot, evidence=evidence, shapes=False)
            held = (replace(one, why=instead) for one in report.held)
        elif draft is not None:
            report = SlotReport(slot, "claim", ())
            shown = draft if owner != CORE else None
            held = (Holder(owner, words(draft), why, value=shown, evidence=evidence),)
        else:
            continue
        held = tuple(one if followed else replace(one, value=None) for one in held)
        yield replace(report, held=held)


def _parameter_claims(
    info: builders.ParamInfo, slots: builders.OptimizerSlots, model: builders.ModelSlots
) -> Iterator[SlotReport]:
    """Yield reports of the claims on one parameter: initial values, rule, multipliers."""
    name = info.name
    yield _claim(model.init.claims[name], _declared(info.init))
    assigned = slots.assigned[name]
    rules = {*assigned.held.values()}
    also = tuple(f"opt.assign[{rule}]" for rule in rules)
    facts = {"also": also, "usual": not rules, "heading": "".join(also[:1])}
    yield _claim(assigned, DEFAULT_RULE, **facts)
    for key, usual in USUAL.items():
        claim = slots.multipliers[name, key]
        value = getattr(info, key, None)  # the value that its module declares
        default = "the rule's own" if value is None else f"{value:g}"
        untouched = not claim.held and value == usual
        yield _claim(claim, default, usual=untouched, heading=f"opt.set[{key}]")
    frozen = slots.views if FROZEN in rules else None  # a frozen parameter has no view
    for claims in (slots.tables, slots.blocks, slots.views, slots.follows):
        if claims[name].held and claims is not frozen:
            yield _claim(claims[name])


def _declared(init: Mapping[str, Any]) -> str:
    """Describe initial values as their module declares them."""
    numbers = (value for key, value in init.items() if key != "init")
    shown = ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in numbers)
    return f"{str(init['init']).capitalize()}({shown})"


def _parameter(
    info: builders.ParamInfo, claims: tuple[SlotReport, ...], model: builders.ModelSlots
) -> SlotReport:
    """Return the report of a whole parameter: its module, and each claim, accepted or refused."""
    shape = " x ".join(map(str, info.shape))
    held, refused = [Holder(info.owner, f"{shape}, {info.role}", "declares it")], []
    for report in claims:
        short = report.slot.replace(f"[{info.name}]", "")
        always = not short.startswith("opt.set")
        held += [
            replace(one, why=f"{short}: {one.why}")
            for one in report.held
            if always or one.why != UNCLAIMED
        ]
        refused += report.refused
    leaf = model.linear.get(info.name.removesuffix(".weight"))
    products = leaf.held.items() if leaf else ()
    held += [Holder(owner, words(node), "model.linear: claims it") for owner, node in products]
    return SlotReport(info.name, "parameter", tuple(held), tuple(refused))


def kernel_reports(offers: Mapping[str, tuple[str, Candidate]]) -> Iterator[SlotReport]:
    """Yield reports of the ops that plugins offer kernels for; a kernel is selected at binding."""
    ops: dict[str, list[Holder]] = {}
    for key in sorted(offers):
        owner, one = offers[key]
        holder = Holder(owner, one.name, "offers it", value=one.name, evidence=f"kernel:{key}")
        ops.setdefault(one.op, []).append(holder)
    yield from (SlotReport(f"kernel[{op}]", "query", tuple(held)) for op, held in ops.items())


def hook_reports(
    batchers: Iterable[str], judges: Iterable[str], observers: Iterable[str]
) -> Iterator[SlotReport]:
    """Yield reports of ``on_batch`` in the order of the calls, ``on_evaluated`` and ``on_event``."""
    order = "who writes a field comes before who reads it"
    apart = "gets every event, apart from the others"
    # settled: the first evaluation may follow the steps in which evidence must appear
    for hook, value, plugins, why, evidence in (
        ("on_batch", "batches", batchers, order, "batch:{}"),
        ("on_evaluated", "verdicts", judges, "judges each evaluation", "slot:on_evaluated"),
        ("on_event", "events", observers, apart, "event:{}"),
    ):
        held = [Holder(p, hook, why, value=value, evidence=evidence.format(p)) for p in plugins]
        none = Holder(CORE, NOTHING, "the default: no plugin implements it")
        yield SlotReport(hook, "chain", tuple(held) or (none,))


RULE = "opt.rule["


@dataclass(frozen=True)
class FilledSlot:
    """A slot that a plugin fills, in one or several layers; safe to print."""

    owner: str
    slot: str  # attention.layout, model.residual[in][x0], opt.assign[muon]
    where: str  # "layers 0-3", "layer 2", or "" outside the layers
    what: str

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return f"{self.slot}{place}: {self.what}"


def filled_slots(plan: Plan) -> tuple[FilledSlot, ...]:
    """Return every slot of the plan that a plugin fills, by plugin."""
    single = [p for p in plan.placements if not p.slot.startswith(RULE)]
    entries = [*((p.slot, (p.owner, p.what)) for p in single), *_rules(plan)]
    entries.sort(key=lambda entry: entry[1][0])
    found = []
    for pattern, (owner, what), layers in fold(entries):
        slot = pattern.replace("layers.*.", "").replace("[*]", "")
        found.append(FilledSlot(plain(owner), plain(slot), located(layers), plain(what)))
    return tuple(found)


def _rules(plan: Plan) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the stages of a rule that one plugin provides, in order, as one entry."""
    for name, rule in sorted(plan.rules.items()):
        held: dict[str, list[tuple[str, str]]] = {}
        for anchor, owner, stage in rule.stages:
            held.setdefault(owner, []).append((anchor, words(stage)))
        for owner, stages in held.items():
            if owner != CORE:
                anchor = f".{stages[0][0]}" if len(stages) == 1 else ""
                yield f"{RULE}{name}]{anchor}", (owner, ", ".join(what for _, what in stages))


def slots_of(plan: Plan, plugin: str) -> tuple[str, ...]:
    """Return the slots that one plugin fills, as ``minillm plugins info`` shows them."""
    return tuple(str(entry) for entry in filled_slots(plan) if entry.owner == plugin)


def fold(entries: Iterable[tuple[str, T]]) -> list[tuple[str, T, tuple[int, ...]]]:
    """Fold (name, value) to (name with ``*`` for the layer, value, layers), in order of appearance.

    A name without a layer has none.
    """
    layers: dict[tuple[str, T], list[int]] = {}
    for name, value in entries:
        numbers = layers.setdefault((LAYER.sub("*", name, count=1), value), [])
        if found := LAYER.search(name):
            numbers.append(int(found[0]))
    return [(name, value, tuple(sorted(held))) for (name, value), held in layers.items()]


def ranges(numbers: Iterable[int]) -> str:
    """Format 0, 1, 2, 3, 5 as ``0-3, 5``."""
    placed = enumerate(sorted({*numbers}))  # in a consecutive run, number - index is constant
    runs = ([n for _, n in run] for _, run in groupby(placed, lambda one: one[1] - one[0]))
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def located(layers: Iterable[int]) -> str:
    """Format layers as ``layers 0-3`` or ``layer 2``; empty if there are none."""
    found = [*layers]
    return f"layer{'s' if len(found) > 1 else ''} {ranges(found)}" if found else ""


def words(value: Any) -> str:
    """Format a value in a slot: ``Gate(width=12)``, ``nesterov``, ``0.5``, ``muon.lr``."""
    match value:
        case Node():
            given = ", ".join(f"{key}={argument}" for key, argument in value.arguments)
            return f"{_last(value.reference)}{f'({given})' if given else ''}"
        case Setting():
            return f"{value.constant:g}" if value.value is None else value.value
        case Learned():
            return f"learned, from {value.start:g}"
        case Omitted():
            return "none"
        case Loop():
            return f"layers {value.first} to {value.last}, {words(value.times)} times"
        case DocumentMask():
            return "apart"
        case Init():
            numbers = ", ".join(str(v) for key, v in value.data().items() if key != "init")
            return f"{type(value).__name__}({numbers})"
        case Target():
            return f"weight {words(value.weight)}"
        case Term():
            source = value.emitted if value.node is None else words(value.node)
            return f"{source}, weight {words(value.weight)}"
        case Plateaus() | Piecewise():
            knots = ", ".join(f"{number:g} from {at:.3g}" for at, number in value.knots)
            return f"{type(value).__name__.lower()}: {knots} of the run"
        case RowChoice():
            return f"{words(value.node)}, keeps {value.keep:.0%}"
        case Gathering():
            return f"supervised positions, in {value.buckets} sizes"
        case Field():
            return f"{value.dtype} (rows, T{''.join(f', {n}' for n in value.shape)})"
        case Reserved():
            return value.text
        case Sourcing():
            return words(value.source)
        case Function() | Stage():
            return _last(value.reference)
        case Draft():
            return _last(value.stage.reference)
        case ChainedStage():
            return words(value.draft)
        case _:
            return str(value)


def _last(reference: str) -> str:
    return reference.rpartition(":")[2]
