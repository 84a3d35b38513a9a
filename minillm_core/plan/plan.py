"""The plan: what would be built, by whom; pure data, made without any framework."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minillm_core.config.schema import Config
from minillm_core.nn.decoder import DecoderSpec
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.init import Init
from minillm_core.nn.node import Node
from minillm_core.nn.param import Param, State
from minillm_core.nn.value import Setting
from minillm_core.ops.select import Candidate
from minillm_core.optim.groups import Group
from minillm_core.optim.schedules import Schedule, Stages, TrainSchedule
from minillm_core.optim.stage import Rule
from minillm_core.plan.placements import Placement
from minillm_core.plan.reads import BATCH
from minillm_core.plugins.builders import ParamInfo
from minillm_core.plugins.builders.data import Field

if TYPE_CHECKING:
    from minillm_core.plan.estimate import Estimate

__all__ = ["Export", "Plan", "PlannedPlugin", "as_json"]


@dataclass(frozen=True)
class PlannedPlugin:
    """An active plugin: who it is, and what must be seen of it."""

    name: str
    distribution: str | None
    version: str | None
    digest: str  # of the file that defines it
    options: dict[str, Any]
    expected: tuple[str, ...]  # witnesses: node:..., stage:..., parameter:..., batch:..., ...


@dataclass(frozen=True)
class Export:
    """Which directory layout the trained model fits, or who stands in the way."""

    layout: str | None  # "llama", "qwen3"
    blocked_by: tuple[str, ...] = ()
    reason: str = ""  # why a layout that a plugin claims does not fit


@dataclass(frozen=True)
class Plan:
    """A run, resolved. ``data`` and ``hash`` cover all that decides what is learnt."""

    config: Config
    spec: DecoderSpec
    parameters: Mapping[str, ParamInfo]
    inits: Mapping[str, Init]  # claimed initial values
    groups: tuple[Group, ...]
    schedule: TrainSchedule
    schedules: Mapping[str, tuple[str, Schedule]]  # value -> owner, schedule
    batch_fields: tuple[tuple[str, str, Field], ...]
    on_batch: tuple[str, ...]  # plugins, in the order in which they are called
    candidates: tuple[tuple[str, Candidate], ...]  # owner, candidate
    plugins: tuple[PlannedPlugin, ...]
    placements: tuple[Placement, ...]  # what each plugin put where, sorted
    digests: Mapping[str, str]  # module -> sha256 of its file, for what the plan refers to
    core_version: str
    export: Export
    notes: tuple[str, ...] = ()  # what plugins tell a person of it

    @cached_property
    def hash(self) -> str:
        """sha256 of :meth:`data`."""
        text = json.dumps(self.data(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def with_train(self, **settings: Any) -> Plan:
        """The same plan with other settings of ``train``, such as no plugin plans by.

        Schedules are fractions of the steps; compilation is chosen when the plan is bound.
        """
        train = self.config.train.model_copy(update=settings)
        return replace(self, config=self.config.model_copy(update={"train": train}))

    def data(self) -> dict[str, Any]:
        """The plan as JSON: model, loss, optimizer, schedules, data order, versions, digests.

        Not in it: seed, paths, device, dtype, kernels, and how a step's rows are split.
        """
        train, data = self.config.train, self.config.data
        plan: dict[str, Any] = {
            "model": {
                **self.config.model.model_dump(mode="json"),
                "spec": as_json(self.spec),
                "parameters": {name: as_json(info) for name, info in self.parameters.items()},
                "inits": as_json(dict(self.inits)),
            },
            "optimizer": {
                "rules": {name: rule.data() for name, rule in sorted(self.rules.items())},
                "groups": [group.data() for group in self.groups],
                "clip": train.clip,
            },
            "schedules": {
                "run": as_json(self.schedule),
                "values": {
                    name: {"owner": owner, **schedule.data()}
                    for name, (owner, schedule) in sorted(self.schedules.items())
                },
            },
            "train": {"steps": train.steps, "minutes": train.minutes},
            "data": {
                "rows": train.rows * train.accumulate,
                "seq_len": train.seq_len,
                "seed": data.seed,
                "val": data.val if isinstance(data.val, float) else "path",
            },
            "versions": {"minillm-core": self.core_version},
        }
        if self.plugins:
            plan["data"]["fields"] = [as_json(entry) for entry in self.batch_fields]
            plan["data"]["on_batch"] = list(self.on_batch)
            plan["plugins"] = {p.name: p.options for p in self.plugins}
            plan["versions"].update((p.name, p.version) for p in self.plugins)
            plan["digests"] = dict(sorted(self.digests.items()))
        return plan

    def values(self, progress: float) -> dict[str, float]:
        """Schedule value -> number at ``progress`` in (0, 1] of the run."""
        return {n: s.at(progress, self.schedule) for n, (_, s) in sorted(self.schedules.items())}

    @property
    def rules(self) -> dict[str, Rule]:
        """The update rules by name, as they are where no parameter has betas of its own."""
        plain_last = sorted(self.groups, key=lambda group: not group.members[0].overrides)
        return {group.rule.name: group.rule for group in plain_last}

    @property
    def staged(self) -> tuple[str, ...]:
        """Values that change the compiled step."""
        return tuple(n for n, (_, s) in sorted(self.schedules.items()) if isinstance(s, Stages))

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Batch fields that the model reads: all that has to reach the device."""
        spec = self.spec
        nodes = [*spec.embed, *spec.streams]
        nodes += [term.node for term in spec.loss.terms if term.node is not None]
        nodes += [spec.final_norm] if isinstance(spec.final_norm, Node) else []
        reads = {name for node in nodes for name in node.external}
        reads |= {name for place in (*spec.blocks, spec.final) if place for name in place.reads()}
        reads |= {target.field for target in spec.loss.targets if target.field}
        offered = {*BATCH, *(name for name, _, _ in self.batch_fields)}
        return tuple(sorted({"ids", "labels", "weights"} | (reads & offered)))

    @property
    def tokens_per_step(self) -> int:
        """rows x accumulate x seq_len, on one device."""
        train = self.config.train
        return train.rows * train.accumulate * train.seq_len

    def estimate(self, dtype: str | None = None, *, dense_logits: bool = False) -> Estimate:
        """Parameters, FLOPs and bytes: see :func:`minillm_core.plan.estimate.estimate`."""
        from minillm_core.plan.estimate import estimate

        return estimate(self, dtype, dense_logits=dense_logits)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(info.size for info in self.parameters.values())


def as_json(value: Any) -> Any:
    """Dataclasses of a plan as JSON; classes themselves are left out, references say enough."""
    if isinstance(value, (Node, Setting, Init, Schedule)):
        return value.data()
    if isinstance(value, Geometry):  # how long a row will be fed is not part of the model
        return {k: v for k, v in asdict(value).items() if k != "positions"}
    if isinstance(value, (Param, State)):
        raise TypeError(f"{value!r} is a declaration, not data")
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    return value
