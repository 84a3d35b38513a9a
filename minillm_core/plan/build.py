"""config + plugins -> Plan: every hook is called once, every clash is an error, nothing is computed."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from minillm_core.config.schema import Config
from minillm_core.errors import PlanError
from minillm_core.nn.attention import AttentionSpec
from minillm_core.nn.block import BlockSpec
from minillm_core.nn.decoder import DecoderSpec, decoder
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.init import Init, Normal
from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.param import Param
from minillm_core.ops.contract import LossForm
from minillm_core.ops.select import Candidate
from minillm_core.optim.groups import Group
from minillm_core.optim.schedules import TrainSchedule
from minillm_core.plan.plan import Export, Plan, PlannedPlugin, as_json
from minillm_core.plugins.builders import (
    AttentionBuilder,
    AttentionSlots,
    DataBuilder,
    DataSlots,
    KernelBuilder,
    LossBuilder,
    LossSlots,
    ModelBuilder,
    ModelSlots,
    OptimizerBuilder,
    OptimizerSlots,
    ParamInfo,
)
from minillm_core.plugins.builders.base import ValueTable
from minillm_core.plugins.manager import LoadedPlugin, Manager
from minillm_core.plugins.origin import digest_of

__all__ = ["build_plan", "geometry_of"]

BATCH = ("ids", "labels", "documents", "positions", "weights")


def build_plan(config: Config, plugins: Manager | Iterable[LoadedPlugin] = ()) -> Plan:
    """Resolve a run.

    Raises:
        PlanError: slots that clash, shapes that cannot be built, a plugin that put nothing in.
        PluginCodeError: a plugin's own code raised.
    """
    manager = plugins if isinstance(plugins, Manager) else Manager(plugins)
    geometry, values = geometry_of(config), ValueTable()
    spec, inits, data = _model(config, geometry, manager, values)
    _check_reads(spec, data, values)
    model = decoder(spec)
    parameters, inits = _parameters(model, inits)
    groups = _optimizer(config, parameters, manager, values)
    held: dict[str, tuple[str, Candidate]] = {}
    manager.call("kernel_provider", lambda p: {"kernels": KernelBuilder(p.name, values, held)})
    batchers = data.order(tuple(p.name for p in manager.implementing("on_batch")))
    return Plan(
        config=config,
        spec=spec,
        parameters=parameters,
        inits=inits,
        groups=groups,
        schedule=TrainSchedule(config.train.schedule, config.train.warmup),
        schedules=dict(sorted(values.held.items())),
        batch_fields=data.fields.resolve(),
        on_batch=batchers,
        candidates=tuple(held[key] for key in sorted(held)),
        plugins=tuple(
            _planned(plugin, _expected(plugin, manager, model, spec, parameters, groups, held))
            for plugin in manager.plugins
        ),
        digests=_digests(spec, groups, manager),
        core_version=importlib.metadata.version("minillm-core"),
        export=_export(manager, spec),
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


def _model(
    config: Config, geometry: Geometry, manager: Manager, values: ValueTable
) -> tuple[DecoderSpec, dict[str, Init], DataSlots]:
    base = config.model.rope_base
    output_init = Normal(0.02 / (2 * geometry.layers) ** 0.5)  # GPT-2's: the stream keeps its size
    attention = [AttentionSlots(replace(geometry, layer=i), base) for i in range(geometry.layers)]
    for slots in attention:
        manager.call(
            "build_attention",
            lambda p, slots=slots: {"attn": AttentionBuilder(p.name, values, slots)},
        )
    model, loss, data = ModelSlots(geometry), LossSlots(), DataSlots()
    manager.call("build_model", lambda p: {"model": ModelBuilder(p.name, values, model)})
    manager.call("compute_loss", lambda p: {"loss": LossBuilder(p.name, values, loss)})
    manager.call("build_data", lambda p: {"data": DataBuilder(p.name, values, data)})
    spec = DecoderSpec(
        geometry=geometry,
        tied=config.model.tied,
        embed=tuple(node for _, node in model.embed.resolve()),
        streams=model.ordered_streams(),
        blocks=tuple(
            _block(i, attention[i], model, output_init) for i in range(geometry.layers)
        ),
        final=model.site("final"),
        final_norm=model.norm["final"].resolve(),
        loss=loss.resolve(),
        linears=tuple((leaf, model.linear[leaf].resolve()) for leaf in sorted(model.linear)),
    )
    inits = {name: claim.resolve() for name, claim in sorted(model.init.items())}
    return spec, inits, data


def _block(index: int, slots: AttentionSlots, model: ModelSlots, output_init: Init) -> BlockSpec:
    at = f"layers.{index}"
    claimed = model.attention[index].resolve()
    if claimed is not None and (other := slots.touched()):
        raise PlanError(
            f"'{claimed.owner}' replaces the whole attention of layer {index}, and '{other}' "
            "wants a slot of it",
            where=model.attention[index].where,
            fix=f"give them different layers, or drop one (--plugins -{other})",
        )
    attention: Any = slots.resolve(output_init) if claimed is None else claimed
    return BlockSpec(
        attention=attention,
        mlp=model.mlp[index].resolve(),
        attention_norm=model.norm[f"{at}.attention"].resolve(),
        mlp_norm=model.norm[f"{at}.mlp"].resolve(),
        site_in=model.site(f"{at}.in"),
        site_mid=model.site(f"{at}.mid"),
        site_out=model.site(f"{at}.out"),
        taps=tuple(place for place in ("in", "mid", "out") if f"{at}.{place}" in model.taps),
    )


def _check_reads(spec: DecoderSpec, data: DataSlots, values: ValueTable) -> None:
    """Every name that a node reads is there by then."""
    known = {*BATCH, *values.held, *(name for name, _, _ in data.fields.resolve())}
    for node in spec.embed:
        _check_names(node.owner, node.external, known, "model.embed")
    known |= {"x0"}
    for node in spec.streams:
        _check_names(node.owner, node.external, known, f"stream '{node.name}'")
        known.add(node.name)
    for index, block in enumerate(spec.blocks):
        for node in block.nodes():
            _check_names(node.owner, node.external, known, f"layers.{index}")
        for site in block.sites():
            _check_site(site, known)
        known |= {f"layers.{index}.{tap}" for tap in block.taps}
    if spec.final is not None:
        _check_site(spec.final, known)
    for term in spec.loss.terms:
        if term.node is not None:
            _check_names(term.owner, term.node.external, known, "loss.term")
    fields = {target.field for target in spec.loss.targets if target.field}
    for target in spec.loss.targets:
        if target.field in fields - known:
            _check_names(target.owner, (target.field or "",), known, "loss.target")


def _check_site(site: Any, known: set[str]) -> None:
    for source, owner, coefficient in site.terms:
        external = getattr(coefficient, "external", ())
        needs = [] if source in ("carry", "sublayer") else [source]
        _check_names(owner, (*needs, *external), known, f"residual site {site.name}")


def _check_names(owner: str, names: Iterable[str], known: set[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise PlanError(
                f"plugin '{owner}' reads '{name}', which nothing provides there",
                where=where,
                fix="what can be read there: " + ", ".join(sorted(known)),
            )


def _parameters(
    model: Any, inits: Mapping[str, Init]
) -> tuple[dict[str, ParamInfo], dict[str, Init]]:
    owners = _owners(model)
    parameters = {}
    for name, module, _, param in declared(model, Param):
        parameters[name] = ParamInfo(
            name=name,
            shape=param.shape,
            axes=param.axes,
            role=param.role,
            init=as_json(inits.get(name, param.init)),
            owner=owners.get(module.path, "core"),
            lr_mul=param.lr_mul,
            wd_mul=param.wd_mul,
        )
    for name in inits:
        if name not in parameters:
            raise PlanError(
                f"initial values are claimed for '{name}', which is no parameter of this model",
                where=f"model.init[{name}]",
            )
    return parameters, dict(inits)


def _owners(model: Any) -> dict[str, str]:
    """Path -> the plugin whose module it is, or is part of."""
    owners: dict[str, str] = {}
    for path, module in named_modules(model):
        inherited = owners.get(path.rpartition(".")[0])
        for parent in _parents(path):
            inherited = inherited or owners.get(parent)
        owner = getattr(module, "owner", None) or inherited
        if owner:
            owners[path] = owner
    return owners


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def _optimizer(
    config: Config, parameters: Mapping[str, ParamInfo], manager: Manager, values: ValueTable
) -> tuple[Group, ...]:
    slots = OptimizerSlots(parameters, values, config.train)
    manager.call(
        "optimizer_factory", lambda p: {"optimizer": OptimizerBuilder(p.name, values, slots)}
    )
    return slots.resolve()


def _expected(
    plugin: LoadedPlugin,
    manager: Manager,
    model: Any,
    spec: DecoderSpec,
    parameters: Mapping[str, ParamInfo],
    groups: tuple[Group, ...],
    held: Mapping[str, tuple[str, Candidate]],
) -> tuple[str, ...]:
    """What must be seen of a plugin: minillm_core.train.evidence looks for these."""
    name = plugin.name
    nodes = [f"node:{p}" for p, m in named_modules(model) if getattr(m, "owner", None) == name]
    nodes += [f"node:{leaf}.product" for leaf, node in spec.linears if node.owner == name]
    owned = [f"parameter:{p.name}" for p in parameters.values() if p.owner == name]
    stages = {
        f"stage:{group.rule.name}.{anchor}"
        for group in groups
        for anchor, owner, _ in group.rule.stages
        if owner == name
    }
    kernels = [f"kernel:{key}" for key, (owner, _) in sorted(held.items()) if owner == name]
    batch = [f"batch:{name}"] if plugin in manager.implementing("on_batch") else []
    events = [f"event:{name}"] if plugin in manager.implementing("on_event") else []
    slots = [f"slot:{slot}" for slot in _other_slots(name, spec)]
    expected = (*nodes, *owned, *sorted(stages), *kernels, *batch, *events, *slots)
    if not expected:
        raise PlanError(
            f"plugin '{name}' put nothing into the plan",
            where=plugin.source,
            fix=f"look at its options (minillm plugins info {name}), or drop it "
            f"(--plugins -{name})",
        )
    return expected


def _other_slots(name: str, spec: DecoderSpec) -> list[str]:
    """Slots that hold no module: what is true of them is true by construction."""
    slots = []
    for index, block in enumerate(spec.blocks):
        if isinstance(block.attention, AttentionSpec):
            attention = block.attention
            for slot in ("window", "scale"):
                setting = getattr(attention, slot)
                if setting is not None and setting.owner == name:
                    slots.append(f"layers.{index}.attention.{slot}")
            for slot in ("frequencies", "scaling"):
                claimed = getattr(attention.rope, slot)
                if claimed is not None and claimed[0] == name:
                    slots.append(f"layers.{index}.attention.rope.{slot}")
        for site in block.sites():
            slots += [f"residual.{site.name}" for _, owner, _ in site.terms if owner == name]
        for place in ("attention", "mlp", "attention_norm", "mlp_norm"):
            if getattr(getattr(block, place), "owner", None) == name:
                slots.append(f"layers.{index}.{place}")
    if spec.final is not None:
        slots += ["residual.final" for _, owner, _ in spec.final.terms if owner == name]
    if spec.loss.form_owner == name:
        slots.append("loss.logits")
    slots += [f"loss.target.{t.key}" for t in spec.loss.targets if t.owner == name]
    return slots


def _planned(plugin: LoadedPlugin, expected: tuple[str, ...]) -> PlannedPlugin:
    return PlannedPlugin(
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        digest=plugin.digest,
        options=plugin.plugin.options(),
        expected=expected,
    )


def _digests(spec: DecoderSpec, groups: tuple[Group, ...], manager: Manager) -> dict[str, str]:
    """sha256 of every file outside the core that the plan refers to."""
    modules = {plugin.name: plugin.digest for plugin in manager.plugins}
    for reference in _references(as_json(spec)) | _references([g.rule.data() for g in groups]):
        module = reference.partition(":")[0]
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and not module.startswith("minillm_core."):
            modules[module] = digest_of(file)
    return modules


def _references(data: Any) -> set[str]:
    if isinstance(data, dict):
        found = {data["reference"]} if isinstance(data.get("reference"), str) else set()
        return found.union(*(_references(item) for item in data.values()))
    if isinstance(data, list):
        return set().union(*(_references(item) for item in data))
    return set()


def _export(manager: Manager, spec: DecoderSpec) -> Export:
    """Plugins that leave the model's function alone do not count."""
    inside = _model_owners(spec)
    layouts: dict[str, str] = {}
    blocked = []
    for plugin in manager.plugins:
        if plugin.name in inside:
            layout = plugin.plugin.manifest.export
            if layout is None:
                blocked.append(plugin.name)
            else:
                layouts[plugin.name] = layout
    wanted = set(layouts.values())
    if blocked or len(wanted) > 1:
        return Export(None, tuple(sorted(blocked or layouts)))
    return Export(wanted.pop() if wanted else "llama")


def _model_owners(spec: DecoderSpec) -> set[str]:
    nodes = [*spec.embed, *spec.streams, *(node for _, node in spec.linears)]
    owners = {node.owner for node in nodes}
    for block in spec.blocks:
        owners |= {node.owner for node in block.nodes()}
        owners |= {owner for site in block.sites() for _, owner, _ in site.terms}
        for place in (block.attention, block.mlp, block.attention_norm, block.mlp_norm):
            owners.add(getattr(place, "owner", "core"))
        if isinstance(block.attention, AttentionSpec):
            attention = block.attention
            owners |= {s.owner for s in (attention.window, attention.scale) if s is not None}
            rope = (attention.rope.frequencies, attention.rope.scaling)
            owners |= {claim[0] for claim in rope if claim is not None}
    if spec.final is not None:
        owners |= {owner for _, owner, _ in spec.final.terms}
    owners.add(getattr(spec.final_norm, "owner", "core"))
    if spec.loss.form.evaluated() != LossForm():
        owners.add(spec.loss.form_owner)
    return owners - {"core"}

