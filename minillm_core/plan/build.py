"""config + plugins -> Plan: every hook is called once, every clash is an error, nothing is computed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from minillm_core.config.schema import Config
from minillm_core.errors import PlanError
from minillm_core.nn.block import BlockSpec, Nothing
from minillm_core.nn.decoder import DecoderSpec, decoder
from minillm_core.nn.geometry import Geometry
from minillm_core.optim.schedules import TrainSchedule
from minillm_core.plan.declared import Declared
from minillm_core.plan.owners import digests, expected, export
from minillm_core.plan.parameters import parameters_of, started
from minillm_core.plan.placements import (
    Placement,
    field_placements,
    init_placements,
    model_placements,
    optimizer_placements,
)
from minillm_core.plan.plan import Plan, PlannedPlugin
from minillm_core.plan.reads import BATCH, check_reads
from minillm_core.plan.rehearse import rehearse
from minillm_core.plugins.builders import (
    AttentionBuilder,
    AttentionSlots,
    DataBuilder,
    DataSlots,
    KernelBuilder,
    LossBuilder,
    ModelBuilder,
    ModelSlots,
    OptimizerBuilder,
    OptimizerSlots,
)
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.manager import LoadedPlugin, Manager

__all__ = ["build_plan", "geometry_of"]


def build_plan(
    config: Config,
    plugins: Manager | Iterable[LoadedPlugin] = (),
    said: Declared | None = None,
) -> Plan:
    """Resolve a run.

    Args:
        config: the settings.
        plugins: those that the run names.
        said: empty slots; also where planning is refused they hold what came until then.

    Raises:
        PlanError: slots that clash, shapes that cannot be built, a plugin that put nothing in.
        PluginCodeError: a plugin's own code raised.
    """
    manager = plugins if isinstance(plugins, Manager) else Manager(plugins)
    said = said or Declared.of(config, geometry_of(config))
    said.layered |= {p.name for p in manager.plugins if _told_layers(p)}
    values, data, held = said.values, said.data, said.kernels
    spec = _model(config, manager, said)
    fields = data.fields.resolve()
    _check_data(data, manager)
    rehearse(spec, manager)
    model = decoder(spec)
    _check_terms(model, spec)
    parameters = parameters_of(model)
    inits = said.model.inits({name: parameter.role for name, parameter in parameters.items()})
    parameters |= started(parameters, inits)
    said.optimizer = optimizer = OptimizerSlots(parameters, values, config.train)
    manager.call(
        "optimizer_factory", lambda p: {"optimizer": OptimizerBuilder(p.name, values, optimizer)}
    )
    said.heard.add("optimizer_factory")
    groups = optimizer.resolve()
    check_reads(spec, (name for name, _, _ in fields), values.held)
    manager.call("kernel_provider", lambda p: {"kernels": KernelBuilder(p.name, values, held)})
    candidates = tuple(held[key] for key in sorted(held))
    batchers, observers = manager.implementing("on_batch"), manager.implementing("on_event")
    placements = (
        *model_placements(spec),
        *init_placements(inits),
        *optimizer_placements(optimizer),
        *field_placements(fields),
        *(Placement(o, f"kernel[{c.op}]", c.name, shapes=False) for o, c in candidates),
        *(Placement(p.name, "on_batch", "batches", shapes=False) for p in batchers),
        *(Placement(p.name, "on_event", "events", shapes=False) for p in observers),
    )
    return Plan(
        config=config,
        spec=spec,
        parameters=parameters,
        inits={name: init for name, (_, init) in inits.items()},
        groups=groups,
        schedule=TrainSchedule(config.train.schedule, config.train.warmup, config.train.cooldown),
        schedules=dict(sorted(values.held.items())),
        batch_fields=fields,
        on_batch=data.order(tuple(p.name for p in batchers)),
        candidates=candidates,
        plugins=tuple(
            PlannedPlugin(
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                digest=plugin.digest,
                options=plugin.plugin.options(),
                expected=expected(plugin, model, parameters, placements),
            )
            for plugin in manager.plugins
        ),
        placements=tuple(sorted(placements)),
        digests=digests(spec, parameters, groups, manager),
        core_version=importlib.metadata.version("minillm-core"),
        export=export(manager, placements),
        notes=tuple(f"{owner}: {text}" for owner, text in values.notes),
    )


def geometry_of(config: Config, positions: int | None = None) -> Geometry:
    """The sizes of the configured model; ``positions`` defaults to the row's length."""
    model = config.model
    return Geometry(
        layers=model.layers,
        dim=model.dim,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.dim // model.heads,
        hidden=model.hidden,
        vocab=model.vocab,
        positions=positions or config.train.seq_len,
    )


def _told_layers(plugin: LoadedPlugin) -> bool:
    """Whether it has an option ``layers`` that says which it goes into."""
    return isinstance(dict(plugin.plugin).get("layers"), Layers)


def _model(config: Config, manager: Manager, said: Declared) -> DecoderSpec:
    attention, values = said.attention, said.values
    for slots in attention:
        manager.call(
            "build_attention",
            lambda p, slots=slots: {"attn": AttentionBuilder(p.name, values, slots)},
        )
    said.heard.add("build_attention")
    model, loss, data = said.model, said.loss, said.data
    manager.call("build_model", lambda p: {"model": ModelBuilder(p.name, values, model)})
    said.heard.add("build_model")
    length = config.train.seq_len
    manager.call(
        "compute_loss", lambda p: {"loss": LossBuilder(p.name, values, loss, length=length)}
    )
    said.heard.add("compute_loss")
    manager.call("build_data", lambda p: {"data": DataBuilder(p.name, values, data)})
    said.heard.add("build_data")
    geometry = model.geometry
    return DecoderSpec(
        geometry=geometry,
        tied=config.model.tied,
        embed=tuple(node for _, node in model.embed.resolve()),
        streams=model.ordered_streams(),
        blocks=tuple(_block(i, attention[i], model, manager) for i in range(geometry.layers)),
        taps=tuple((name, site) for name, _, site in model.tap_names.resolve()),
        final=model.site("final"),
        final_norm=model.norm["final"].resolve(),
        loss=loss.resolve(),
        linears=tuple((leaf, model.linear[leaf].resolve()) for leaf in sorted(model.linear)),
    )


def _block(index: int, slots: AttentionSlots, model: ModelSlots, manager: Manager) -> BlockSpec:
    at = f"layers.{index}"
    claimed = model.attention[index].resolve()
    if isinstance(claimed, Nothing):
        _check_unnamed(claimed.owner, slots, manager)
    elif claimed is not None and (other := min(slots.owners(), default=None)):
        raise PlanError(
            f"'{claimed.owner}' replaces the whole attention of layer {index}, and '{other}' "
            "wants a slot of it",
            where=model.attention[index].where,
            fix=f"give them different layers, or leave out '{other}'",
        )
    attention: Any = slots.resolve() if claimed is None else claimed
    mlp = model.mlp[index].resolve()
    for part, place, site in ((attention, "attention", "mid"), (mlp, "mlp", "out")):
        if isinstance(part, Nothing):
            _check_absent(part.owner, place, at, site, model)
    return BlockSpec(
        attention=attention,
        mlp=mlp,
        attention_norm=model.norm[f"{at}.attention"].resolve(),
        mlp_norm=model.norm[f"{at}.mlp"].resolve(),
        site_in=model.site(f"{at}.in"),
        site_mid=model.site(f"{at}.mid"),
        site_out=model.site(f"{at}.out"),
        taps=tuple(place for place in ("in", "mid", "out") if f"{at}.{place}" in model.taps),
    )


def _check_unnamed(owner: str, slots: AttentionSlots, manager: Manager) -> None:
    """Who is in every layer's attention is in none that is left out; who lists that layer errs."""
    layer, layers = slots.geometry.layer or 0, slots.geometry.layers
    for plugin in manager.plugins:
        listed = [
            option
            for option, value in plugin.plugin
            if isinstance(value, Layers) and value.names(layer, layers)
        ]
        if listed and plugin.name in slots.owners():
            raise PlanError(
                f"{plugin.name}.{listed[0]} names layer {layer}, whose attention '{owner}' leaves "
                "out",
                where=f"model.attention[{layer}]",
                fix=f"take {layer} from {plugin.name}.{listed[0]}, or leave out '{owner}'",
            )


def _check_absent(owner: str, place: str, at: str, site: str, model: ModelSlots) -> None:
    """Neither the norm nor the share of a sublayer that a plugin leaves out may be claimed."""
    norm, residual = model.norm[f"{at}.{place}"], model.residual[f"{at}.{site}"]
    share = residual.held.get("sublayer")
    claimants = {*norm.held, *(() if share is None else share[:1])}
    if claimants:
        where = norm.where if norm.held else f"{residual.where}[sublayer]"
        raise PlanError(
            f"'{owner}' leaves out the {place} of {at}, and '{min(claimants)}' claims {where}",
            where=where,
            fix=f"give them different layers, or leave out '{owner}'",
        )


def _check_data(data: DataSlots, manager: Manager) -> None:
    """Who declares a field writes it; who reads one finds it."""
    batchers = {plugin.name for plugin in manager.implementing("on_batch")}
    fields = {name for name, _, _ in data.fields.resolve()}
    for name, owner, _ in data.fields.resolve():
        if owner not in batchers:
            raise PlanError(
                f"plugin '{owner}' declares the batch field '{name}', and has no on_batch",
                where=f"data.field[{name}]",
                fix="write the field in on_batch(batch, phase)",
            )
    for owner, names in sorted(data.reads.items()):
        for name in sorted(names - fields - set(BATCH)):
            raise PlanError(
                f"on_batch of plugin '{owner}' reads '{name}', which no plugin writes",
                where="data.reads",
                fix="what there is: " + ", ".join(sorted(fields | set(BATCH))),
            )


def _check_terms(model: Any, spec: DecoderSpec) -> None:
    """A term of the loss that nodes emit is emitted by one at least."""
    for term in spec.loss.terms:
        if term.emitted is not None and not model.term_sources[term.key]:
            raise PlanError(
                f"plugin '{term.owner}' adds the term '{term.emitted}' to the loss, and none of "
                "its nodes emits it",
                where=f"loss.term[{term.key}]",
                fix=f"name it in a node's class: terms = ('{term.emitted}',)",
            )
