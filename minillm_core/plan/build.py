"""config + plugins -> Plan: every hook is called once, a conflict is an error, no arrays are computed."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Any

from minillm_core.config.load import Loaded
from minillm_core.config.schema import Config
from minillm_core.errors import PlanError
from minillm_core.nn.attention import Masks
from minillm_core.nn.block import INPUTS, BlockSpec, Omitted
from minillm_core.nn.decoder import DecoderSpec, Loop, decoder
from minillm_core.nn.decoding import outwards
from minillm_core.nn.init import Init, Same
from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.node import Node
from minillm_core.nn.param import Param
from minillm_core.nn.reference import Function, place_of, resolve
from minillm_core.nn.residual import SiteSpec
from minillm_core.optim.groups import Group
from minillm_core.optim.schedules import TrainSchedule
from minillm_core.plan.plan import BATCH, Export, Plan, PlannedPlugin, as_json
from minillm_core.plan.slots import (
    SlotState,
    SlotTable,
    hook_reports,
    kernel_reports,
    located,
    masks_of,
    optimizer_reports,
)
from minillm_core.plugins import builders
from minillm_core.plugins.attribution import digest_of
from minillm_core.plugins.builders.data import Shaping
from minillm_core.plugins.builders.loss import Reference
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.manager import LoadedPlugin, Manager, load
from minillm_core.plugins.slots import AFTER, EMBED, LOSS, PLACES, Slot, Terms, clash_fix, slots_in
from minillm_core.plugins.sourcing import Sourcing
from minillm_core.text import did_you_mean

_REFERENCE = re.compile(r'"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*"')
"""A reference to a function or class in a JSON document; its group is the module."""
_version = cache(version)


def build_plan(
    config: Config | Loaded,
    plugins: Manager | Iterable[LoadedPlugin] | None = None,
    state: SlotState | None = None,
) -> Plan:
    """Build the plan of a run by calling every plugin's hooks, without computing arrays (a dry run).

    Args:
        config: the settings, as :func:`minillm_core.load` returns them.
        plugins: the active plugins; None: the plugins that the settings name are imported.
        state: empty slots; if planning is refused, they keep the entries made until then.

    Raises:
        PlanError: slots that conflict, shapes that cannot be built, a plugin that adds nothing.
        PluginCodeError: a plugin's own code raised.
    """
    settings = None
    if isinstance(config, Loaded):
        settings, config = config, config.config
        plugins = load(settings.specs, config.plugins) if plugins is None else plugins
    if not isinstance(config, Config):
        what = f"build_plan({config!r})"
        raise PlanError("a plan needs settings", where=what, fix="build_plan(load(preset=...))")
    manager = plugins if isinstance(plugins, Manager) else Manager(plugins or ())
    state = state or SlotState.of(config)
    # plugins with an option ``layers``, which selects the layers they change
    layered = ((p.name, dict(p.plugin).get("layers")) for p in manager.plugins)
    state.layered |= {name for name, layers in layered if isinstance(layers, Layers)}
    values, data, kernels = state.values, state.data, state.kernels
    state.fill(manager, "build_attention", builders.AttentionBuilder, *state.attention)
    state.fill(manager, "build_model", builders.ModelBuilder, state.model)
    state.fill(manager, "compute_loss", builders.LossBuilder, state.loss)
    state.fill(manager, "build_data", builders.DataBuilder, data)
    spec = _model(config, manager, state)
    fields, arrangement, shaping = data.fields.resolve(), data.arrangement(), data.shaping()
    sourcing = _with_digest(data.sourcing(), manager)
    _check_data(data, manager, config)
    if shaping is not None:
        _check_shapes(shaping, arrangement.get("packer"), spec)
    table = state.table()
    build_nodes_once(spec, table, manager)
    model = decoder(spec)
    _check_terms(model, spec)
    _check_loop(model, spec.loop)
    parameters = _parameters_of(model, {*BATCH, *(name for name, _, _ in fields)})
    inits = state.model.init.resolve({name: info.role for name, info in parameters.items()})
    parameters |= _with_claimed_inits(parameters, inits)
    train, heads = config.train, (config.model.heads, config.model.kv_heads)
    state.optimizer = builders.OptimizerSlots(parameters, values, train, heads)
    state.fill(manager, "optimizer_factory", builders.OptimizerBuilder, state.optimizer)
    groups, curve = state.optimizer.resolve(), state.optimizer.schedule.resolve()
    outranked = state.optimizer.outranked
    same = dict(_leader_inits(groups, model, inits))
    parameters, inits = parameters | _with_claimed_inits(parameters, same), inits | same
    trained = {m.name: parameters[m.name] for group in groups for m in group.members}
    check_reads(spec, table, {*BATCH, *values.held, *(name for name, _, _ in fields)})
    state.fill(manager, "kernel_provider", builders.KernelBuilder, kernels)
    on_batch = data.order(tuple(p.name for p in manager.implementing("on_batch")))
    judges, observers = (
        tuple(p.name for p in manager.implementing(hook)) for hook in ("on_evaluated", "on_event")
    )
    more = *kernel_reports(kernels), *hook_reports(on_batch, judges, observers)
    table = SlotTable((*table, *optimizer_reports(state.optimizer, state.model), *more))
    updated = [info.init for info in parameters.values()], [group.rule.data() for group in groups]
    return Plan(
        config=config,
        spec=spec,
        parameters=parameters,
        inits={name: init for name, (_, init) in inits.items()},
        groups=groups,
        schedule=TrainSchedule(
            *(train.schedule, train.warmup, train.cooldown),
            curve=curve,
            rates=state.optimizer.rates.resolve(),
        ),
        schedules=dict(sorted(values.held.items())),
        batch_fields=fields,
        arrangement=arrangement,
        sourcing=sourcing,
        shaping=shaping,
        on_batch=on_batch,
        candidates=tuple(kernels[key] for key in sorted(kernels)),
        references=tuple(one for _, _, one in state.loss.references.resolve()),
        plugins=tuple(
            _planned(
                one,
                model,
                trained,
                table,
                outranked.get(one.name, ()),
                [rule for rule, (owner, _) in state.optimizer.rules.items() if owner == one.name],
            )
            for one in manager.plugins
        ),
        digests=_digests(manager, spec, updated, (arrangement, shaping, curve), sourcing),
        core_version=_version("minillm-core"),
        export=_export(manager, table, spec.training_alone),
        table=table,
        notes=tuple(f"{owner}: {text}" for owner, text in values.notes),
        active=manager.plugins,
        settings=settings,
    )


def _model(config: Config, manager: Manager, state: SlotState) -> DecoderSpec:
    model = state.model
    _check_replaced(state, manager)
    return DecoderSpec(
        geometry=model.geometry,
        tied=config.model.tied,
        embed=tuple(node for _, node in model.embed.resolve()),
        streams=model.ordered_streams(),
        blocks=tuple(_block(slots, model) for slots in state.attention),
        taps=tuple((name, site) for name, _, site in model.tap_names.resolve()),
        final=model.site("final"),
        final_norm=model.norm["final"].resolve(),
        loss=state.loss.resolve(),
        linears=tuple((leaf, model.linear[leaf].resolve()) for leaf in sorted(model.linear)),
        loop=model.loop.resolve(),
    )


def _block(slots: builders.AttentionSlots, model: builders.ModelSlots) -> BlockSpec:
    index = slots.layer
    at, claimed = f"layers.{index}", model.sublayer["attention", index].resolve()
    attention: Any = slots.resolve() if claimed is None else claimed
    mlp = model.sublayer["mlp", index].resolve()
    apart = tuple(filter(None, (model.site(f"{at}.{part}") for part in INPUTS)))
    for one in apart:
        part = one.name.removeprefix(f"{at}.")
        by = mlp if part == "mlp" else attention
        if isinstance(by, Omitted) or (isinstance(by, Node) and "." in part):
            raise _no_input(one, by, index)
    for part, place, site in ((attention, "attention", "mid"), (mlp, "mlp", "out")):
        if isinstance(part, Omitted):
            _check_absent(part.owner, place, at, site, model)
    return BlockSpec(
        attention=attention,
        mlp=mlp,
        attention_norm=model.norm[f"{at}.attention"].resolve(),
        mlp_norm=model.norm[f"{at}.mlp"].resolve(),
        site_in=model.site(f"{at}.in"),
        site_mid=model.site(f"{at}.mid"),
        site_out=model.site(f"{at}.out"),
        taps=_taps(at, attention, model),
        apart=apart,
        seen=Masks(**{name: getattr(slots, name).resolve() for name in masks_of(attention)}),
    )


def _no_input(site: SiteSpec, by: Node | Omitted, layer: int) -> PlanError:
    """Return the error for an input of a part that a plugin leaves out or replaces."""
    (who, *_) = (*(owner for _, owner, _ in site.terms), *(one.owner for one in site.computed))
    part = "mlp" if site.name.endswith(".mlp") else "attention"
    return PlanError(
        f"plugin '{who}' gives {site.name} an input of its own, and '{by.owner}' {_verb_of(by)} "
        f"that {part}",
        where=f"model.{part}[{layer}]",
        fix=f"give them different layers, or leave out '{who}' or '{by.owner}'",
    ).concerning(plugins=(who, by.owner))


def _taps(at: str, attention: Any, model: builders.ModelSlots) -> tuple[str, ...]:
    """Return the places of a block that are tapped; refuse taps of an attention without these arrays."""
    taps = tuple(sorted(s.removeprefix(f"{at}.") for s in model.taps if s.startswith(f"{at}.")))
    inner = [tap for tap in taps if tap.startswith("attention.")]
    if inner and isinstance(attention, (Node, Omitted)):
        site = f"{at}.{inner[0]}"
        owner = next(who for _, who, its in model.tap_names.resolve() if its == site)
        raise PlanError(
            f"plugin '{owner}' taps {site}, and '{attention.owner}' {_verb_of(attention)} that "
            "attention",
            where=f"model.attention[{at.removeprefix('layers.')}]",
            fix=f"tap another layer, or leave out '{owner}' or '{attention.owner}'",
        ).concerning(plugins=(owner, attention.owner))
    return taps


def _check_replaced(state: SlotState, manager: Manager) -> None:
    """Check the plugins with slots of an attention that another plugin replaces or leaves out.

    A plugin that is also in other layers stays in those, with a note if the attention is replaced;
    a plugin that lists the layer by index, or is in no other layer, is refused.
    """
    claims = [state.model.sublayer["attention", one.layer].resolve() for one in state.attention]
    pairs = list(zip(state.attention, claims, strict=True))
    elsewhere = {
        o for one, by in pairs if by is None for s in _inside(one, by, state) for o in s.owners
    }
    skipped: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for slots, by in pairs:
        if by is None:
            continue
        gone = _inside(slots, by, state)
        others = sorted({owner for slot in gone for owner in slot.owners} - {by.owner})
        _check_unnamed(by, others, slots, manager)
        if alone := [other for other in others if other not in elsewhere]:
            where = [one.where for one in gone if alone[0] in one.owners]
            fix = clash_fix(by.owner, alone[0])
            if by.owner in state.layered and len(pairs) > 1:
                fix += f"; or give '{by.owner}' fewer layers: {by.owner}.layers=[-1]"
            raise PlanError(
                f"'{by.owner}' {_verb_of(by)} the whole attention of layer {slots.layer}, and "
                f"'{alone[0]}' wants a slot of it, and has none elsewhere",
                where=f"model.attention[{slots.layer}]",
                fix=fix,
            ).concerning(*where, plugins=(by.owner, alone[0]))
        if others and isinstance(by, Node):
            skipped.setdefault((by.owner, tuple(others)), []).append(slots.layer)
        for one in gone:  # unread inputs; the other slots are never resolved
            if isinstance(one, Terms) and one.shared:
                one.held = {key: its for key, its in one.held.items() if its[0] == by.owner}
    for (owner, others), layers in skipped.items():
        text = f"its attention in {located(layers)} has no slots: {', '.join(others)} " + (
            "are in the other layers" if len(others) > 1 else "is in the other layers"
        )
        state.values.notes[owner, text] = None


def _inside(
    slots: builders.AttentionSlots, by: Node | Omitted | None, state: SlotState
) -> list[Slot]:
    """Return the slots of a layer's attention that disappear if a plugin replaces it or leaves it out."""
    parts = INPUTS[1 if isinstance(by, Node) else 0 : -1]  # a plugin's own attention has an input
    inputs = [state.model.inputs[f"layers.{slots.layer}.{part}"] for part in parts]
    kept = [getattr(slots, name) for name in masks_of(by)]
    return [*(one for one in slots_in(slots) if one not in kept), *inputs]


def _verb_of(by: Node | Omitted) -> str:
    """Return the verb for what a plugin does to an attention."""
    return "leaves out" if isinstance(by, Omitted) else "replaces"


def _check_unnamed(
    by: Node | Omitted, others: Collection[str], slots: builders.AttentionSlots, manager: Manager
) -> None:
    """Refuse a plugin that lists a layer whose attention has no slots; "all" selects the other layers."""
    layer, layers = slots.layer, slots.geometry.layers
    for plugin in manager.plugins:
        options = ((name, one) for name, one in plugin.plugin if isinstance(one, Layers))
        listed = [name for name, one in options if one.names(layer, layers)]
        if listed and plugin.name in others:
            raise PlanError(
                f"{plugin.name}.{listed[0]} names layer {layer}, whose attention '{by.owner}' "
                f"{_verb_of(by)}",
                where=f"model.attention[{layer}]",
                fix=f"take {layer} from {plugin.name}.{listed[0]}, or leave out '{by.owner}'",
            ).concerning(plugins=(plugin.name, by.owner))


def _check_absent(owner: str, place: str, at: str, site: str, model: builders.ModelSlots) -> None:
    """Refuse a claim on the norm or the share of a sublayer that a plugin leaves out."""
    norm, residual = model.norm[f"{at}.{place}"], model.residual[f"{at}.{site}"]
    share = residual.held.get("sublayer")
    claimants = {*norm.held, *(() if share is None else share[:1])}
    if claimants:
        where = norm.where if norm.held else f"{residual.where}[sublayer]"
        raise PlanError(
            f"'{owner}' leaves out the {place} of {at}, and '{min(claimants)}' claims {where}",
            where=where,
            fix=f"give them different layers, or leave out '{owner}'",
        ).concerning(where, plugins=(owner, min(claimants)))


def _check_shapes(shaping: Shaping, packer: Function | None, spec: DecoderSpec) -> None:
    """Refuse rows of several lengths if a packer, or a target with an offset, does not support them."""
    lengths, who = {shape.seq_len for shape in shaping.shapes}, shaping.choose.owner
    if len(lengths) > 1 and packer and not resolve(packer.reference).any_capacity:
        raise PlanError(
            f"the packer of plugin '{packer.owner}' lays out rows of one length, '{who}' changes it",
            where="data.packer",
            fix=f"leave out '{packer.owner}' or '{who}'; a packer that reads self.capacity for each "
            "row says any_capacity = True in its class",
        ).concerning("data.packer", plugins=(packer.owner,))
    for one in spec.loss.targets:
        if (ahead := one.offset or 1) > (shortest := min(lengths)):
            raise PlanError(
                f"plugin '{one.owner}' predicts {ahead} tokens ahead, in rows of {shortest} tokens",
                where=f"{who}, loss.target[{one.key}]",
                fix=f"rows of {ahead} tokens or more, or nearer targets",
            ).concerning(plugins=(one.owner,))


def _by_the_clock(who: str, what: str) -> PlanError:
    """Return the error for a run limited by minutes whose number of steps must be known."""
    return PlanError(
        f"{what}, which is unknown if the run ends by the clock: batches are made ahead of training",
        where="train.minutes",
        fix=f"a number of steps instead (--steps N), or leave out '{who}'",
    ).concerning(plugins=(who,))


def _check_data(data: builders.DataSlots, manager: Manager, config: Config) -> None:
    """Refuse arguments that an ``on_batch`` cannot receive, and a declared field that no hook writes."""
    batchers = {plugin.name for plugin in manager.implementing("on_batch")}
    for one in manager.implementing("on_batch"):
        taken = inspect.signature(one.plugin.on_batch).parameters  # type: ignore[attr-defined]
        if "progress" in taken and config.train.steps is None:
            raise _by_the_clock(one.name, f"on_batch of plugin '{one.name}' takes progress")
    if (shaping := data.shaping()) and config.train.steps is None:
        who = shaping.choose.owner
        raise _by_the_clock(who, f"'{who}' sizes batches by the share of the steps that are done")
    fields = {name for name, _, _ in data.fields.resolve()}
    for name, owner, _ in data.fields.resolve():
        if owner not in batchers and name not in data.given:
            raise PlanError(
                f"plugin '{owner}' declares the batch field '{name}', but has no on_batch",
                where=f"data.field[{name}]",
                fix="write the field in on_batch(batch, phase)",
            ).concerning(plugins=(owner,))
    for owner, names in sorted(data.reads.items()):
        for name in sorted(names - fields - set(BATCH)):
            raise PlanError(
                f"on_batch of plugin '{owner}' reads '{name}', which no plugin writes",
                where="data.reads",
                fix="known fields: " + ", ".join(sorted(fields | set(BATCH))),
            ).concerning(plugins=(owner,))


def _with_digest(sourcing: Sourcing, manager: Manager) -> Sourcing:
    """Return the sourcing with the source's code: its distribution's version and its file's sha256."""
    if sourcing.source is None:
        return sourcing
    (owner,) = (one for one in manager.plugins if one.name == sourcing.source.owner)
    file = sys.modules[sourcing.source.reference.partition(":")[0]].__file__
    return replace(sourcing, code=(owner.version, file and digest_of(file)))


def _check_terms(model: Any, spec: DecoderSpec) -> None:
    """Refuse a loss term that no node emits, and parameters that receive no gradient."""
    for part in filter(None, (model.rows, model.weights)):
        if any(declared(part, Param)):
            what = f"plugin '{part.owner}': a parameter of {type(part).__name__} gets no gradient"
            fix = (
                "a Buffer, or numbers of its constructor: weights and rows are chosen, not trained"
            )
            raise PlanError(what, where=f"loss.{part.path}", fix=fix)
    for term in spec.loss.terms:
        if term.emitted is not None and not model.term_sources[term.key]:
            raise PlanError(
                f"plugin '{term.owner}' adds the term '{term.emitted}' to the loss, but none of "
                "its nodes emits it",
                where=f"loss.term[{term.key}]",
                fix=f"name it in a node's class: terms = ('{term.emitted}',)",
            ).concerning(plugins=(term.owner,))


def build_nodes_once(spec: DecoderSpec, table: SlotTable, manager: Manager) -> None:
    """Construct each node once, so that errors of its constructor are attributed to its plugin.

    Claimed rotary frequencies are computed as well.

    Raises:
        PluginCodeError: a plugin's own code raised.
    """
    plugins = {plugin.name: plugin for plugin in manager.plugins}
    for node, layer in table.nodes():
        geometry = spec.geometry if layer is None else replace(spec.geometry, layer=layer)
        name = node.reference.rpartition(":")[2]
        with plugins[node.owner].contain(f"{name}.__init__, {node.slot}"):
            node.make(geometry)
    for attention in spec.attentions.values():
        rope = attention.rope
        unscaled = replace(rope, scaling=None)  # its errors belong to another plugin
        for claim, part in ((rope.frequencies, unscaled), (rope.scaling, rope)):
            if claim is not None:
                with plugins[claim.owner].contain("attn.rope"):
                    for number in part.numbers:
                        part.radians(spec.geometry.head_dim, number)


def check_reads(spec: DecoderSpec, table: SlotTable, known: set[str]) -> None:
    """Check, from the batch to the loss, that every value is defined before a node reads it.

    Args:
        spec: the model.
        table: its slots.
        known: batch fields and schedule values; streams and taps are added.

    Raises:
        PlanError: a name that is not defined where it is read, or that has two meanings.
    """
    _check_held(table, EMBED, known)
    known.add("x0")
    _check_streams(spec.streams, known)
    computed = set[str]().union(*(block.computed for block in spec.blocks))
    for name, site in spec.taps:
        if name in known | computed:
            what = f"the tap '{name}' of {site} has a name that is taken"
            raise PlanError(what, where="model.taps", fix="give one of them another name")
    for index, block in enumerate(spec.blocks):
        sites = {"in": block.site_in, "mid": block.site_mid, "out": block.site_out}
        sites |= {one.name.removeprefix(f"layers.{index}."): one for one in block.apart}
        for place, later in PLACES.items():
            _check_streams(getattr(sites.get(place), "computed", ()), known)
            _check_held(table, index + later, known)
        here = {f"layers.{index}.{tap}" for tap in block.taps}
        known |= here | {name for name, site in spec.taps if site in here}
    _check_streams(spec.final.computed if spec.final else (), known)
    _check_held(table, AFTER, known)
    _check_held(table, LOSS, known | _reference_fields(table, known))


def _check_streams(streams: Iterable[Node], known: set[str]) -> None:
    """Check streams, each after the streams that it reads, and add their names to ``known``."""
    for node in streams:
        _check_node(node, known)
        if node.name in known:
            raise PlanError(
                f"plugin '{node.owner}': stream '{node.name}' has the name of a batch field",
                where=node.slot,
                fix="give one of them another name",
            ).concerning(plugins=(node.owner,))
        known.add(node.name)


def _reference_fields(table: SlotTable, known: set[str]) -> set[str]:
    """Return the fields of reference models, which only the loss can read."""
    held = {one.value.name: one for _, one in table.held(LOSS) if isinstance(one.value, Reference)}
    for name in held.keys() & known:
        raise PlanError(
            f"the reference '{name}' has a name that is taken",
            where=f"loss.reference[{name}]",
            fix="give it another name",
        ).concerning(plugins=(held[name].owner,))
    return {*held}


def _check_held(table: SlotTable, order: float, known: set[str]) -> None:
    """Check all nodes computed at one position of a step."""
    held = list(table.held(order))
    for _, holder in held:
        if holder.node is not None:
            _check_node(holder.node, known)
    for report, holder in held:
        for name in holder.inputs:
            if name not in known:
                raise PlanError(
                    f"plugin '{holder.owner}' reads '{name}', which nothing provides there",
                    where=report.slot,
                    fix="values that can be read there: " + ", ".join(sorted(known)),
                ).concerning(plugins=(holder.owner,))


def _check_node(node: Node, known: set[str]) -> None:
    """Check the values that a node's ``forward`` reads beyond the slot's own arguments.

    Raises:
        PlanError: a value is undefined; the error lists the defined names and the place of ``forward``.
    """
    for name in node.external:
        if name in known:
            continue
        meant = did_you_mean(name, {*node.own, *known})
        own = f"the slot gives {', '.join(node.own)}; " if node.own else ""
        raise PlanError(
            f"plugin '{node.owner}' reads '{name}', which nothing provides there",
            where=node.slot,
            fix=f"{meant}{own}there is also {', '.join(sorted(known))}; a stream or a named tap "
            "brings more (model.stream, model.tap)",
            line=place_of(node.cls.forward) if node.cls else None,  # type: ignore[attr-defined]
        ).concerning(plugins=(node.owner,))


def _parameters_of(model: Any, fields: Collection[str]) -> dict[str, builders.ParamInfo]:
    """Return the parameters of an outlined model by name, with the initial values of their modules."""
    for name, field in model.lookups.items():
        if field not in fields:
            what = f"'{name}' is looked up by '{field}', which is not a batch field"
            raise PlanError(what, where=name, fix="known fields: " + ", ".join(sorted(fields)))
    owners = owners_of(model)
    return {
        name: builders.ParamInfo(
            name=name,
            shape=param.shape,
            axes=param.axes,
            role=param.role,
            init=as_json(param.init),
            owner=owners.get(module.path, "core"),
            lr_mul=param.lr_mul,
            wd_mul=param.wd_mul,
            rows=model.lookups.get(name, ""),
        )
        for name, module, _, param in declared(model, Param)
    }


def _with_claimed_inits(
    parameters: Mapping[str, builders.ParamInfo], inits: Mapping[str, tuple[str, Init]]
) -> dict[str, builders.ParamInfo]:
    """Return the parameters whose initial values plugins claim, with those values.

    Args:
        parameters: all parameters of the model.
        inits: parameter -> (owner, initialiser).

    Raises:
        PlanError: a claim on an unknown parameter.
    """
    for name, (owner, _) in inits.items():
        if name not in parameters:
            raise PlanError(
                f"plugin '{owner}' gives initial values to '{name}', which is not a parameter",
                where=f"model.init[{name}]",
                fix=f"{did_you_mean(name, parameters)}minillm plan --json lists them",
            ).concerning(plugins=(owner,))
    return {
        name: replace(parameters[name], init=as_json(init)) for name, (_, init) in inits.items()
    }


def _leader_inits(
    groups: Iterable[Group], model: Any, inits: Mapping[str, tuple[str, Init]]
) -> Iterator[tuple[str, tuple[str, Init]]]:
    """Yield parameter -> (owner, initialiser) of the leader for each parameter that follows one.

    Raises:
        PlanError: a plugin claims other initial values for a follower.
    """
    drawn = {name: param.init for name, _, _, param in declared(model, Param)}
    drawn |= {name: init for name, (_, init) in inits.items()}
    for member in (member for group in groups for member in group.members):
        if (follow := member.follows) is None:
            continue
        if member.name in inits:
            owner = inits[member.name][0]
            raise PlanError(
                f"plugin '{owner}' gives initial values to '{member.name}', which is "
                f"'{follow.leader}' at first, by '{follow.owner}'",
                where=f"model.init[{member.name}]",
                fix=clash_fix(owner, follow.owner),
            ).concerning(member.name, plugins=(owner, follow.owner))
        yield member.name, (follow.owner, Same(follow.leader, drawn[follow.leader]))


def _check_loop(model: Any, loop: Loop | None) -> None:
    """Refuse looped blocks that emit terms or State updates, which exist once per step."""
    if loop is None:
        return
    for block in model.layers[loop.first : loop.last + 1]:
        if names := (*block.term_names, *block.statistic_names):
            owner = owners_of(model).get(names[0].rpartition(".")[0], "core")
            raise PlanError(
                f"plugin '{loop.owner}' runs {block.path} several times, where '{owner}' emits "
                f"'{names[0]}' once",
                where="model.loop",
                fix=f"other layers, or leave out '{loop.owner}' or '{owner}'",
            ).concerning("model.loop", plugins=(loop.owner, owner))


def owners_of(model: Any) -> dict[str, str]:
    """Return path -> plugin for each module that a plugin declares, submodules included."""
    owners: dict[str, str] = {}
    for path, module in named_modules(model):
        # a list or dict of modules has no module at its own path
        around = next((one for one in outwards(path) if one in owners), "")
        if owner := getattr(module, "owner", None) or owners.get(around):
            owners[path] = owner
    return owners


def _planned(
    plugin: LoadedPlugin,
    model: Any,
    trained: Mapping[str, builders.ParamInfo],
    table: SlotTable,
    over: Collection[str],
    rules: Collection[str],
) -> PlannedPlugin:
    """Return the record of a plugin with the evidence that a run must show (minillm_core.train.evidence).

    For a plugin that sets only numbers, these are the evidence: they hold once planned.
    ``over``: the plugins whose claims on parameters outranked its own; ``rules``: its update rules.

    Raises:
        PlanError: it adds nothing to the plan.
    """
    name, named = plugin.name, plugin.name if plugin.distribution else plugin.source
    keys = [f"node:{path}" for path, m in named_modules(model) if getattr(m, "owner", None) == name]
    keys += [f"parameter:{p.name}" for p in trained.values() if p.owner == name]
    keys += table.evidence(name)
    keys = keys or [f"slot:{p.slot}" for p in table.placements() if p.owner == name and p.settled]
    if not keys:
        why = f": its claims on parameters yield to {', '.join(sorted(over))}" if over else ""
        if rules and not over:
            why = f": no parameter follows its rule '{min(rules)}' (optimizer.assign)"
        raise PlanError(
            f"plugin '{name}' put nothing into the plan{why}",
            where=plugin.source,
            fix=f"look at its options (minillm plugins info {named}), or leave it out",
        ).concerning(plugins=(name,))
    whose = (name, plugin.distribution, plugin.version, plugin.digest)
    return PlannedPlugin(*whose, plugin.plugin.options(), tuple(keys))


def _digests(manager: Manager, *parts: Any) -> dict[str, str]:
    """Return module -> sha256 of its file, for every module outside the core that the plan refers to."""
    found = {plugin.name: plugin.digest for plugin in manager.plugins}
    for module in set(_REFERENCE.findall(json.dumps(as_json(parts), ensure_ascii=False))):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and not module.startswith("minillm_core."):
            found[module] = digest_of(file)
    return found


def _export(manager: Manager, table: SlotTable, training_alone: Collection[str]) -> Export:
    """Return the export layout that fits; plugins that do not change the model's function do not count.

    Other layouts extend the core's llama: a plugin that declares llama is compatible with any of them.
    """
    for_loss = {f"model.streams[{path.partition('.')[2]}]" for path in training_alone}
    inside = {one.owner for one in table.placements() if one.shapes and one.slot not in for_loss}
    layouts = {p.name: p.plugin.manifest.export for p in manager.plugins if p.name in inside}
    blocked = sorted(name for name, layout in layouts.items() if layout is None)
    wanted = {layout for layout in layouts.values() if layout is not None} - {"llama"}
    if blocked or len(wanted) > 1:
        return Export(None, tuple(blocked or sorted(layouts)))
    return Export(wanted.pop() if wanted else "llama")
