"""The plan: the resolved model, loss, optimizer and data with their owners; pure data, no framework needed."""

from __future__ import annotations

import hashlib
import html
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minillm_core.config.schema import Config, ModelConfig, Shape
from minillm_core.nn.block import GATHERED
from minillm_core.nn.decoder import DecoderSpec, ahead, lookup
from minillm_core.nn.init import Init
from minillm_core.nn.node import ModelShape, Node, Setting, inputs_of
from minillm_core.nn.param import Param, State
from minillm_core.nn.reference import Function
from minillm_core.ops.select import Candidate
from minillm_core.optim.follow import Follow
from minillm_core.optim.groups import ByRows, Group, Member
from minillm_core.optim.schedules import Schedule, Stages, TrainSchedule
from minillm_core.optim.stage import Rule
from minillm_core.plan.slots import Placement, SlotTable
from minillm_core.plugins.builders import ParamInfo
from minillm_core.plugins.builders.data import Shaping
from minillm_core.plugins.builders.loss import Reference
from minillm_core.plugins.sourcing import PLAIN, Field, Sourcing

if TYPE_CHECKING:
    from minillm_core.config.load import Loaded
    from minillm_core.plan.estimate import Estimate
    from minillm_core.plugins.manager import LoadedPlugin

BATCH = ("ids", "labels", "documents", "positions", "weights")
"""The core's batch fields; ``weights`` only if a plugin or the data provide it."""


@dataclass(frozen=True)
class PlannedPlugin:
    """An active plugin: its identity, and the evidence that a run must show."""

    name: str
    distribution: str | None
    version: str | None
    digest: str  # of the file that defines it
    options: dict[str, Any]
    expected: tuple[str, ...]  # evidence: node:..., stage:..., parameter:..., batch:..., ...


OWN = "own"
"""The layout of a directory that contains the code of its model."""


@dataclass(frozen=True)
class Export:
    """The directory layout that the trained model fits, or the plugins that prevent one."""

    layout: str | None  # "llama", "qwen3"
    blocked_by: tuple[str, ...] = ()
    reason: str = ""  # why a layout that a plugin claims does not fit


@dataclass(frozen=True)
class Plan:
    """A resolved run. ``data`` and ``hash`` cover everything that defines what is trained, except the seed."""

    config: Config
    spec: DecoderSpec
    parameters: Mapping[str, ParamInfo]
    inits: Mapping[str, Init]  # claimed initial values
    groups: tuple[Group, ...]
    schedule: TrainSchedule
    schedules: Mapping[str, tuple[str, Schedule]]  # value -> owner, schedule
    batch_fields: tuple[tuple[str, str, Field], ...]
    arrangement: Mapping[str, Function]  # "order", "packer" and "windows", if claimed
    sourcing: Sourcing  # source, token fields and special tokens of plugins
    shaping: Shaping | None  # None: all batches have the sizes in train
    on_batch: tuple[str, ...]  # plugins, in the order in which they are called
    candidates: tuple[tuple[str, Candidate], ...]  # owner, candidate
    references: tuple[Reference, ...]  # frozen models beside the trained one, sorted by name
    plugins: tuple[PlannedPlugin, ...]
    digests: Mapping[str, str]  # module -> sha256 of its file, for what the plan refers to
    core_version: str
    export: Export
    table: SlotTable = field(compare=False, repr=False)  # every slot, with the core's defaults
    notes: tuple[str, ...] = ()  # notes of plugins, to print
    active: tuple[LoadedPlugin, ...] = field(default=(), repr=False, compare=False)
    settings: Loaded | None = field(default=None, repr=False, compare=False)  # with their origins

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The slots that plugins fill, sorted."""
        return tuple(sorted(self.table.placements()))

    @cached_property
    def hash(self) -> str:
        """sha256 of :meth:`data`."""
        text = json.dumps(self.data(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def with_train(self, **settings: Any) -> Plan:
        """Return the plan with changed settings of ``train``, which must be ones that planning does not use.

        Schedules are fractions of the run; compilation is chosen when the plan is bound.
        """
        train = self.config.train.model_copy(update=settings)
        return replace(self, config=self.config.model_copy(update={"train": train}))

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON: model, loss, optimizer, schedules, data order, versions, digests.

        Left out: seed, paths, device, dtype, kernels, and the split of a step's rows into micro-batches.
        """
        train, data = self.config.train, self.config.data
        model = self.config.model.model_dump(mode="json")
        for key in LATER_SETTINGS:
            if model[key] == ModelConfig.model_fields[key].default:
                del model[key]
        plan: dict[str, Any] = {
            "model": {
                **model,
                "spec": as_json(self.spec),
                "parameters": {
                    # the argument that indexes a table is a fact of its module, not a choice
                    name: as_json(replace(info, rows=""))
                    for name, info in self.parameters.items()
                },
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
        if self.frozen:
            plan["optimizer"]["frozen"] = sorted(self.frozen)
        if self.shaping is not None:  # rows of a step, however split into micro-batches
            plan["data"]["shapes"] = {
                "choose": as_json(self.shaping.choose),
                "of": [[one.rows * one.accumulate, one.seq_len] for one in self.shaping.shapes],
            }
        if self.plugins:
            plan["data"]["fields"] = [as_json(entry) for entry in self.batch_fields]
            plan["data"]["on_batch"] = list(self.on_batch)
            plan["data"] |= as_json(self.arrangement)
            if self.sourcing != PLAIN:
                plan["data"]["source"] = as_json(self.sourcing)
            # the folder of a reference is a path: a run identifies it by its weights (run.json)
            paths = {str(one.model.path) for one in self.references}
            plan["plugins"] = {
                p.name: {k: v for k, v in p.options.items() if str(v) not in paths}
                for p in self.plugins
            }
            plan["versions"].update((p.name, p.version) for p in self.plugins)
            plan["digests"] = dict(sorted(self.digests.items()))
        return plan

    def values(self, progress: float) -> dict[str, float]:
        """Return schedule value -> number at ``progress`` in (0, 1] of the run."""
        return {n: s.at(progress, self.schedule) for n, (_, s) in sorted(self.schedules.items())}

    @property
    def rules(self) -> dict[str, Rule]:
        """The update rules by name, without the betas of single parameters."""
        plain_last = sorted(self.groups, key=lambda group: not group.members[0].overrides)
        return {group.rule.name: group.rule for group in plain_last}

    @property
    def members(self) -> tuple[Member, ...]:
        """The trained parameters, group by group."""
        return tuple(member for group in self.groups for member in group.members)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The frozen parameters: ``optimizer.freeze``."""
        return frozenset(self.parameters) - {member.name for member in self.members}

    @cached_property
    def by_rows(self) -> Mapping[str, ByRows]:
        """The tables with sparse row updates: ``optimizer.rows``."""
        return {member.name: member.rows for member in self.members if member.rows}

    @cached_property
    def views(self) -> Mapping[str, Function]:
        """Parameter -> the function that computes its weights for evaluation: ``optimizer.view``."""
        return {member.name: member.view for member in self.members if member.view}

    @cached_property
    def turns(self) -> Mapping[int, tuple[float, int]]:
        """Looped layer -> (mean number of rounds over the steps, largest number): ``model.loop``."""
        if (loop := self.spec.loop) is None:
            return {}
        steps = self.config.train.steps or 100
        found = [int(loop.times.of(self.values(step / steps))) for step in range(1, steps + 1)]
        return dict.fromkeys(range(loop.first, loop.last + 1), (sum(found) / steps, max(found)))

    @cached_property
    def follows(self) -> Mapping[str, Follow]:
        """The parameters tied to another until a fraction of the run: ``optimizer.follow``."""
        return {member.name: member.follows for member in self.members if member.follows}

    @property
    def staged(self) -> tuple[str, ...]:
        """The schedule values for which a separate step is compiled per number."""
        return tuple(n for n, (_, s) in sorted(self.schedules.items()) if isinstance(s, Stages))

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The batch fields that the model reads and that are copied to the device."""
        offered = {*BATCH, *(name for name, _, _ in self.batch_fields)}
        always = {"ids", "labels", "weights"} | ({GATHERED} if self.spec.loss.gather else set())
        always |= {lookup(name) for name in self.by_rows}
        always |= {ahead(one.offset) for one in self.spec.loss.targets if one.offset}
        return tuple(sorted(always | (inputs_of(self.spec) & offered)))

    def shape_at(self, step: int) -> Shape:
        """Return the batch shape of a step, counted from 1."""
        train = self.config.train
        if self.shaping is None or train.steps is None:
            return train.shapes[-1]
        return self.shaping.at(step, train.steps, self.config.data.seed)

    @cached_property
    def course(self) -> Mapping[Shape, int]:
        """The batch shapes in the order of their first use, each with its number of steps."""
        steps = self.config.train.steps or 1
        if self.shaping is None:
            return {self.shape_at(1): steps}
        return Counter(self.shape_at(step) for step in range(1, steps + 1))

    @property
    def tokens_per_step(self) -> int:
        """rows x accumulate x seq_len, on one device; the mean over the steps if the shape changes."""
        tokens = sum(shape.tokens * steps for shape, steps in self.course.items())
        return round(tokens / sum(self.course.values()))

    def estimate(self, dtype: str | None = None, *, dense_logits: bool = False) -> Estimate:
        """Estimate parameters, FLOPs and bytes: see :func:`minillm_core.plan.estimate.estimate`."""
        from minillm_core.plan.estimate import estimate

        return estimate(self, dtype, dense_logits=dense_logits)

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters, frozen ones included."""
        return sum(info.size for info in self.parameters.values())

    @property
    def num_frozen(self) -> int:
        """The number of frozen parameters."""
        return sum(self.parameters[name].size for name in self.frozen)

    def __str__(self) -> str:
        """Return the table that ``minillm plan`` prints, 100 columns wide."""
        from rich.console import Console

        from minillm_core.plan.render import render_plan

        console = Console(file=io.StringIO(), width=100, color_system=None)
        render_plan(self, console)
        return console.file.getvalue()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        """Return the table as HTML, for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"


LATER = (
    *("rows", "weights", "weight_field", "norm_eps", "template", "ends", "gather", "core", "curve"),
    *("apart", "computed", "rates", "loop", "seen"),
)
"""Fields of a spec that older plans lack: they are left out at their defaults, so that the hashes of those
plans do not change."""
LATER_SETTINGS = ("head_dim", "norm_eps")
"""The same for settings of the model."""
SCALARS = (str, int, float, bool)
"""Types whose values are JSON values."""


def as_json(value: Any) -> Any:
    """Convert the dataclasses of a plan to JSON; classes are left out, since references identify them."""
    if value is None or type(value) in SCALARS:  # nearly all values
        return value
    if isinstance(value, (Node, Setting, Init, Schedule)):
        return value.data()
    if isinstance(value, (Param, State)):
        raise TypeError(f"{value!r} is a declaration, not data")
    if is_dataclass(value) and not isinstance(value, type):
        held = {f: getattr(value, f.name) for f in fields(value)}
        found = {
            f.name: as_json(v) for f, v in held.items() if f.name not in LATER or v != f.default
        }
        if isinstance(value, ModelShape):  # the row length is not part of the model
            del found["positions"]
        return found
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    return value


def variants_of(plan: Plan) -> tuple[tuple[dict[str, int], Shape | None], ...]:
    """Return the variants that a run compiles: staged values with a batch shape; None: only one shape.

    The largest micro-batches come first, so that a lack of memory shows at once.
    """
    if len(plan.course) == 1:
        return tuple((stage, None) for stage in stages_of(plan))
    steps, met = plan.config.train.steps or 1, dict[Any, None]()
    staged = [(name, plan.schedules[name][1]) for name in plan.staged]
    for step in range(1, steps + 1):
        values = tuple((n, int(s.at(step / steps, plan.schedule))) for n, s in staged)
        met[values, plan.shape_at(step)] = None
    largest = sorted(met, key=lambda one: -one[1].rows * one[1].seq_len)
    return tuple((dict(values), shape) for values, shape in largest)


def stages_of(plan: Plan) -> tuple[dict[str, int], ...]:
    """Return the stages of a run in order: every combination of staged values, as value -> number.

    Each has its own compiled step, except for windows that are inputs. All are warmed up before the clock
    starts: "no recompilation" means none after that. One empty stage if nothing is staged.
    """
    staged: dict[str, Any] = {name: plan.schedules[name][1] for name in plan.staged}
    starts = sorted({start for schedule in staged.values() for start, _ in schedule.knots})
    found: list[dict[str, int]] = []
    for start in starts or [0.0]:
        # a stage applies after its knot; the first one from the first step on
        stage = {n: int(s.at(start + 1e-9, plan.schedule)) for n, s in staged.items()}
        if stage not in found:
            found.append(stage)
    return tuple(found)
