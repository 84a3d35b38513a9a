"""``minillm plan --gpus N``: memory, communication and step time per card of a run on N cards.

No GPU is needed: bytes and FLOPs are the plan's own estimate, divided by the layout, and seconds are
from the cost model (cost.py). automatic.py makes one of a command's settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from rich.table import Table

from minillm_core import Plan, Refusal
from minillm_core.commands import amount, columns, counted, sized
from minillm_core.inspection import Group, decoder, named_modules
from minillm_mesh import step_checks, weight_checks
from minillm_mesh.cost import (
    CARDS,
    REACHED,
    SLOWED,
    SPREAD,
    UTILISATION,
    Card,
    Collective,
    Times,
    Work,
    times,
)
from minillm_mesh.exchange import HEADS, KEYS, chosen, numbers
from minillm_mesh.layout import BUCKET, ITERATIONS, Part, layout, rows_of, uncut
from minillm_mesh.stages import GPIPE, Stage, bubble, stages, width
from minillm_mesh.step_checks import SIZES, sizes
from minillm_mesh.tensor_spec import divided, summed

MASTER = 4  # bytes of a float32 element
COMPUTE = {"float32": 4, "bfloat16": 2, "float16": 2}  # dtype -> bytes of an element

BACKWARD = 2 / 3
"""Fraction of a micro-batch's computation spent in the backward pass, if nothing is recomputed."""

ONCE = ("embedding", "head", "loss.weights", "reference")
"""Parts of a model, by the first words of their names, that activation checkpointing does not recompute."""

FULLY, SHARDED, REPLICATED = "fully sharded", "sharded", "replicated"
"""Weights and updates are sharded, updates alone, or neither."""

SHARD: Mapping[str, str] = {"weights": FULLY, "updates": SHARDED, "off": REPLICATED}
"""``mesh.shard`` -> its sharding."""

OTHER: Mapping[str, str] = {FULLY: SHARDED, SHARDED: REPLICATED, REPLICATED: SHARDED}
"""Sharding -> the alternative it is compared with."""


@dataclass(frozen=True)
class UpdateShare:
    """A rank's share of the updates: each field is the maximum over ranks."""

    matrices: int  # updated whole
    of_matrices: int  # in total
    parameters: int  # elements
    state: Mapping[str, int]  # rule -> bytes, of the rank with the most bytes
    flops: float  # of matrix stages


def owned(plan: Plan, ranks: int, *, weights: bool = False) -> UpdateShare:
    """Compute the largest share of updates among ranks. ``weights``: these are sharded too."""
    groups = {member.name: group for group in plan.groups for member in group.members}
    shares = layout(plan.groups, ranks, weights=weights)
    states = [_states(share, groups) for share in shares]
    whole = [[part for part in share if groups[part.name].rule.stacked] for share in shares]
    return UpdateShare(
        matrices=max(map(len, whole)),
        of_matrices=sum(map(len, whole)),
        parameters=max(sum(part.size for part in share) for share in shares),
        state=max(states, key=lambda state: sum(state.values())),
        flops=max(sum(_flops(groups[part.name]) for part in parts) for parts in whole),
    )


def _states(parts: Iterable[Part], groups: Mapping[str, Group]) -> dict[str, int]:
    """Count the bytes of optimizer state of parts, by rule."""
    found: dict[str, float] = {}
    for part in parts:
        group = groups[part.name]
        bytes_kept = sum(
            one.nbytes for its in group.state_arrays().values() for one in its.values()
        )
        numbers = len(group.members) * math.prod(group.members[0].shape)
        name = group.rule.name
        found[name] = found.get(name, 0.0) + bytes_kept * part.size / max(numbers, 1)
    return {name: round(size) for name, size in found.items()}


def _flops(group: Group) -> float:
    """Count the FLOPs of one member's matrix stages: three products per iteration, as in Newton-Schulz."""
    shape = group.shape
    short, long = sorted((shape[0], math.prod(shape[1:])))
    turns = sum(
        dict(stage.arguments).get("steps", ITERATIONS) / stage.every
        for _, _, stage in group.rule.stages
        if stage.needs == "matrix"
    )
    return group.blocks * turns * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True)
class CardForecast:
    """A sharding of a run: the memory, computation and communication of a card."""

    updates: str  # FULLY, SHARDED, REPLICATED
    owned: UpdateShare
    memory: Mapping[str, int]  # part -> bytes
    work: Work
    times: Times

    @property
    def bytes(self) -> int:
        """A card's total memory in bytes."""
        return sum(self.memory.values())

    def data(self, ranks: int) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "updates": self.updates,
            "owned": asdict(self.owned),
            "memory": dict(self.memory),
            "bytes": self.bytes,
            "exchanges": [
                {
                    "what": one.what,
                    "collective": one.kind,
                    "turns": one.turns,
                    "sent_bytes": round(one.sent(ranks)),
                    "seconds": self.times.alone[one.what],
                    "beside": one.beside > 0,
                }
                for one in self.work.exchanges
            ],
            "seconds": {
                **{k: v for k, v in asdict(self.times).items() if k != "alone"},
                "step": self.times.total,
            },
            "communication_share": self.times.share,
        }


@dataclass(frozen=True)
class Forecast:
    """A plan on several cards."""

    plan: Plan
    ranks: int
    card: Card
    dtype: str
    note: str = ""  # why the mesh is not that of the settings

    @property
    def refused(self) -> str | None:
        """The reason why this many cards cannot divide the plan's steps; None: they can."""
        try:
            step_checks.check(self.plan, self.ranks)
        except Refusal as refusal:
            return f"{refusal.what} ({refusal.where}): {refusal.fix}; figures are of equal parts"
        return None

    @cached_property
    def mesh(self) -> Any:
        """The settings of the mesh, with sizes of 0 as 1."""
        asked = self.plan.config.mesh
        return asked.model_copy(update=dict(zip(SIZES, sizes(asked), strict=True)))

    @property
    def tensor(self) -> int:
        """The tensor-parallel size: cards that share each layer."""
        return self.mesh.tensor

    @property
    def parts(self) -> int:
        """The data-parallel size: parts of a step's rows; cards that share rows or layers share a part."""
        mesh = self.mesh
        return max(1, self.ranks // (mesh.context * mesh.tensor * mesh.pipeline))

    @cached_property
    def part(self) -> tuple[float, float, float]:
        """Rows per micro-batch, micro-batches per step of one part, and a rank's tokens, on average."""
        (shape, *_) = self.plan.course
        whole = shape.accumulate % self.parts == 0
        rows = shape.rows / (1 if whole else self.parts)
        micro = shape.accumulate / (self.parts if whole else 1)
        return rows, micro, self.plan.tokens_per_step / self.parts / self.mesh.context

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages; a single one without pipeline parallelism."""
        values, mesh = self.plan.values(1.0), self.mesh
        return stages(self.plan, decoder(self.plan.spec), values, mesh.pipeline)

    @cached_property
    def shard(self) -> str:
        """The resolved ``mesh.shard``: auto is weights if sharded updates exceed the memory and weights fit."""
        if (asked := self.mesh.shard) != "auto":
            return asked
        try:
            weight_checks.check(self.plan)
        except Refusal:
            return "updates"
        alone, both = (sum(self._memory(how).values()) for how in (SHARDED, FULLY))
        return "weights" if both <= self.card.memory < max(alone, self.start) else "updates"

    @cached_property
    def start(self) -> int:
        """Bytes of a card before updates are sharded: whole weights, masters, state (not with sharded weights)."""
        held = self.plan.estimate(self.dtype).memory
        state = sum(size for name, size in held.items() if name.startswith("optimizer state"))
        return held["weights"] + held["master weights"] + state

    @cached_property
    def layouts(self) -> dict[str, CardForecast]:
        """The sharding of the settings first, then its alternative."""
        first = SHARD[self.shard]
        return {name: self._layout(name) for name in (first, OTHER[first])}

    @property
    def chosen(self) -> CardForecast:
        """The sharding of the settings."""
        return next(iter(self.layouts.values()))

    @cached_property
    def alone(self) -> Times:
        """A step of the same tokens on one card."""
        flops = self._flops_per_token * self.plan.tokens_per_step
        return times(self._work(owned(self.plan, 1), flops, ()), 1, self.card)

    @cached_property
    def _recomputed(self) -> float:
        """FLOPs of activation checkpointing relative to those of forward and backward; 0: it is off.

        All of a block is computed again except its last product, whose result nothing reads.
        """
        if self.plan.config.train.checkpointing is not True:
            return 0.0
        estimate = self.plan.estimate(self.dtype)
        again = sum(part.flops for part in estimate.parts if not part.name.startswith(ONCE)) / 3
        for index, block in enumerate(decoder(self.plan.spec).layers):
            if block.plain_mlp and block.mlp is not None:
                down, turns = block.mlp.down, self.plan.turns.get(index, (1, 1))[1]
                again -= 2 * down.in_features * down.out_features * down.share * turns
        return again / estimate.flops_per_token

    @property
    def _flops_per_token(self) -> float:
        return self.plan.estimate(self.dtype).flops_per_token * (1 + self._recomputed)

    @property
    def scaling_efficiency(self) -> float:
        """Scaling efficiency: tokens per second over those of one card times the number of cards."""
        return self.alone.total / self.ranks / self.chosen.times.total

    def data(self) -> dict[str, Any]:
        """Return it as JSON."""
        one, other = self.layouts.values()
        rows, micro, tokens = self.part
        return {
            "gpus": self.ranks,
            "hosts": math.ceil(self.ranks / self.card.host),
            "card": asdict(self.card),
            "dtype": self.dtype,
            "rows": rows,
            "micro_batches": micro,
            "tokens": tokens,
            "flops": one.work.flops,
            "recomputed_flops": one.work.flops * self._recomputed / (1 + self._recomputed),
            "refused": self.refused,
            "sizes": {**{name: getattr(self.mesh, name) for name in SIZES}, "note": self.note},
            **self._divided(),
            "tokens_per_second": self.plan.tokens_per_step / one.times.total,
            "of_linear": self.scaling_efficiency,
            **one.data(self.ranks),
            "otherwise": other.data(self.ranks),
            "assumed": {name: {"value": v, "source": why} for name, v, why in self._assumed()},
        }

    def shown(self) -> Iterator[Table]:
        """Yield the printed tables, at least 80 columns wide."""
        one, other = self.layouts.values()
        facts = Table.grid(padding=(0, 2, 0, 0))
        facts.add_column(style="bold", no_wrap=True)
        facts.add_column(overflow="fold")
        for fact in self._facts(one, other):
            facts.add_row(*fact)
        yield facts
        memory = columns(f"bytes a card in {self.dtype}", f">{one.updates}", f">{other.updates}")
        for name in {**one.memory, **other.memory}:
            memory.add_row(name, *(sized(each.memory.get(name, 0)) for each in (one, other)))
        memory.add_row("all", sized(one.bytes), sized(other.bytes))
        yield memory
        moved = columns("sent a step by a card", "collective", ">bytes", ">time", "beside")
        for each in (one, other):
            for exchange in each.work.exchanges:
                size = sized(exchange.sent(self.ranks))
                taken = f"{1e3 * each.times.alone[exchange.what]:.3g} ms"
                beside = "computing" if exchange.beside else "nothing"
                what = f"{each.updates}: {exchange.what}"
                moved.add_row(what, exchange.kind, size, taken, beside)
        yield moved
        assumed = columns("assumed", ">", "by")
        for name, value, why in self._assumed():
            assumed.add_row(name, value if isinstance(value, str) else f"{value:g}", why)
        yield assumed

    def _facts(self, one: CardForecast, other: CardForecast) -> Iterator[tuple[str, str]]:
        card, ranks = self.card, self.ranks
        hosts, mesh = math.ceil(ranks / card.host), self.mesh
        yield f"{ranks:,} GPUs", f"{card.name}, {counted(hosts, 'host')} of {min(ranks, card.host)}"
        rows, micro, tokens = self.part
        if self.refused:
            yield "training refuses", self.refused
        if self.note:
            yield "mesh", self.note
        again = self._recomputed / (1 + self._recomputed)
        recomputed = f", {again:.0%} of them recomputed" if again else ""
        many = "micro-batch" if micro == 1 else "micro-batches"
        whole = f"{micro:g} {many} of {counted(int(rows), 'row')}, " if rows.is_integer() else ""
        yield (
            "layout",
            f"{self._ranks()}; of a step each has {whole}{tokens:,.0f} tokens, "
            f"{amount(one.work.flops)}FLOP{recomputed}",
        )
        if mesh.context > 1:
            way = chosen(self.plan, mesh.context)
            how = {KEYS: "keys and values are gathered", HEADS: "heads are exchanged for columns"}
            note = f"; {way.note}" if way.note else ""
            yield "context", f"{mesh.context} cards share each row: {how[way.way]}{note}"
        if mesh.pipeline > 1:
            runs = [f"{len(one.blocks)} of {one.flops / 1e6:,.0f} MFLOP" for one in self.stages]
            crossing = sorted({name for one in self.stages for name in one.sent})
            also = (
                f", and {len(crossing)} more arrays"
                if len(crossing) > 3
                else ", ".join(["", *crossing])
            )
            yield (
                "pipeline",
                f"{mesh.pipeline} stages of blocks, a token's FLOPs each: {', '.join(runs)}; between them "
                f"the residual stream{also}; {mesh.schedule}, {self._bubble:.1%} of a step waiting",
            )
        yield "updates", self._updates(one)
        t, bubble = one.times, ""
        if t.bubble:
            bubble = f", {1e3 * t.bubble:.2g} for other stages"
        per_second = self.plan.tokens_per_step / one.times.total
        yield (
            "step",
            f"about {1e3 * t.total:,.3g} ms: {1e3 * t.computing:,.3g} computing, {1e3 * t.update:.2g} "
            f"update, {1e3 * t.exposed:.2g} communication, {1e3 * t.slowed:.2g} slowed by it, "
            f"{1e3 * t.waiting:.2g} waiting for the slowest{bubble}; {amount(per_second)}tokens/s, "
            f"{self.scaling_efficiency:.2f} of linear",
        )
        yield "communication", f"{t.share:.1%} of the step's time"
        yield (
            f"mesh.shard={next(name for name, how in SHARD.items() if how == other.updates)}",
            f"about {1e3 * other.times.total:,.3g} ms, {other.times.share:.1%} communication, "
            f"{sized(other.bytes)} a card",
        )
        if one.bytes > card.memory:
            yield (
                "does not fit",
                f"{sized(one.bytes)} of {sized(card.memory)} a card: fewer train.rows, and as many more "
                "train.accumulate",
            )
        elif one.updates != FULLY and self.start > card.memory:
            yield (
                "does not fit",
                f"{sized(self.start)} of {sized(card.memory)} a card before the first step, when each "
                "has all weights, masters and state",
            )

    def _ranks(self) -> str:
        ranks = counted(self.parts, "data rank")
        return (
            ranks if self.tensor == 1 else f"{ranks} of {self.tensor} cards, which share each layer"
        )

    def _updates(self, one: CardForecast) -> str:
        if one.updates == REPLICATED:
            return "each rank updates every parameter, and has all of the optimizer's state"
        mine, trained = one.owned, self.plan.num_parameters - self.plan.num_frozen
        rows = ""
        if one.updates == FULLY:
            rows = f"a rank has rows of each parameter, {1 / self.ranks:.1%} of all"
            if self.mesh.shard == "auto":
                rows += ", since updates alone would not fit"
            rows += "; it "
        matrices = ""
        if mine.of_matrices:
            matrices = f"{mine.matrices} of {mine.of_matrices} matrices whole, "
        return (
            f"{rows or 'a rank '}owns {matrices}{amount(mine.parameters)} of {amount(trained)} numbers with "
            f"their state ({mine.parameters / max(trained, 1):.1%}), at most"
        )

    def _layout(self, updates: str) -> CardForecast:
        mine = self._owned(updates)
        each = [one.flops for one in self.stages]
        tokens = self.part[2] * max(each) / sum(each) / self.tensor  # whole-model equivalent
        flops = self._flops_per_token * tokens
        exchanges = (*self._exchanges(updates), *self._activations())
        exchanges += (*self._of_columns(), *self._of_stages())
        work = self._work(mine, flops, exchanges)
        work = replace(work, bubble=(len(each) - 1) / self.part[1])
        return CardForecast(
            updates, mine, self._memory(updates), work, times(work, self.ranks, self.card)
        )

    def _owned(self, updates: str) -> UpdateShare:
        ranks = 1 if updates == REPLICATED else self.ranks
        return owned(self.plan, ranks, weights=updates == FULLY)

    @property
    def _bubble(self) -> float:
        return bubble(len(self.stages), math.ceil(self.part[1]))

    def _divided(self) -> dict[str, Any]:
        """Return the context, tensor and pipeline parallelism as JSON, if used."""
        mesh, found = self.mesh, dict[str, Any]()
        if mesh.context > 1:
            found["context"] = {
                "cards": mesh.context,
                "exchange": chosen(self.plan, mesh.context).way,
            }
        if mesh.pipeline > 1:
            found["pipeline"] = {
                "schedule": mesh.schedule,
                "bubble": self._bubble,
                "stages": [
                    {
                        "layers": [layer for layer, _ in one.blocks],
                        "flops_per_token": one.flops,
                        "sends": [*one.sent],
                    }
                    for one in self.stages
                ],
            }
        return found

    def _work(self, mine: UpdateShare, flops: float, exchanges: tuple[Collective, ...]) -> Work:
        """Compute the work of a card that owns ``mine``."""
        moved = mine.parameters * (3 * MASTER + COMPUTE[self.dtype]) + 2 * sum(mine.state.values())
        return Work(flops, mine.flops, moved, exchanges)

    def _exchanges(self, updates: str) -> tuple[Collective, ...]:
        """List the collectives of a step, as in torch_ranks.py."""
        if updates == FULLY:
            return self._of_weights()
        numbers = self.plan.num_parameters - self.plan.num_frozen
        gradients, weights = MASTER * numbers, COMPUTE[self.dtype] * numbers
        if updates == REPLICATED:
            return (Collective("gradients", "all-reduce", gradients),)
        # one micro-batch in 16 bits; stages of a pipeline always add up in float32
        single = weights < gradients and self.part[1] <= 1 and self.mesh.pipeline == 1
        return (
            Collective("gradients", "all-to-all", weights)
            if single
            else Collective("gradients", "reduce-scatter", gradients),
            Collective("weights", "all-gather", weights),
        )

    @cached_property
    def _units(self) -> dict[str, int]:
        """Count elements per FSDP unit, by its first layer, and everything outside layers under ""."""
        found = {"": 0}
        for info in self.plan.parameters.values():
            parts, unit = info.name.split("."), ""
            if parts[0] == "layers":
                unit = str(int(parts[1]) // self.mesh.unit * self.mesh.unit)
            found[unit] = found.get(unit, 0) + info.size
        return found

    def _of_weights(self) -> tuple[Collective, ...]:
        """List the collectives of sharded weights, as in torch_weights.py and FSDP, with their overlap."""
        if self.ranks == 1:
            return ()
        micro, itemsize, units = self.part[1], COMPUTE[self.dtype], self._units
        calls = {unit: self.plan.turns.get(int(unit), (1, 1))[1] for unit in units if unit}
        turns, once = math.ceil(micro) * sum(calls.values()), math.ceil(micro)
        layers = micro * itemsize * sum(units[unit] * many for unit, many in calls.items())
        trained = self.plan.num_parameters - self.plan.num_frozen
        gradients = micro * MASTER * trained
        backward = (BACKWARD + self._recomputed) / (1 + self._recomputed)
        each = backward / (layers + gradients)  # both are sent while the backward pass runs
        yet = ("weights", "all-gather", layers + itemsize * units[""], turns + 1)
        found = [
            Collective(*yet, beside=1 - backward),
            Collective("weights, again", "all-gather", layers, turns, beside=layers * each),
            Collective("gradients", "reduce-scatter", gradients, turns + once, gradients * each),
        ]
        if whole := sum(self.plan.parameters[name].size for name in uncut(self.plan.groups)):
            buckets = math.ceil(MASTER * whole / self.ranks / BUCKET)
            each = MASTER * whole / self.ranks
            for what in ("gradients to owners", "masters to owners", "masters of owners"):
                found.append(Collective(what, "all-to-all", each, buckets))
        return tuple(found)

    def _activations(self) -> tuple[Collective, ...]:
        """List the all-reduces of tensor parallelism, forward and backward, as in tensor.py."""
        if self.tensor == 1:
            return ()
        spec, train = self.plan.spec, self.plan.config.train
        whole = decoder(spec)
        shares = {path: getattr(one, "share", 1.0) for path, one in named_modules(whole)}
        leaves = summed(whole, decoder(divided(spec, self.tensor)))
        passes = 3 if train.checkpointing is True else 2
        often = {leaf: self._turns(int(leaf.split(".")[1])) for leaf in leaves}
        calls = passes * sum(often.values())
        tokens = passes * sum(often[leaf] * shares[leaf] for leaf in leaves) * self.part[2]
        size, turns = tokens * spec.geometry.dim * COMPUTE[self.dtype], round(calls * self.part[1])
        return (Collective("sums of layers", "all-reduce", size, turns, among=self.tensor),)

    def _turns(self, layer: int) -> int:
        """Return how often a block runs in a micro-batch, at the end of training."""
        return self.plan.turns.get(layer, (1, 1))[1]

    def _of_columns(self) -> tuple[Collective, ...]:
        """List the collectives of context parallelism, forward and backward, as in context.py."""
        size, g = self.mesh.context, divided(self.plan.spec, self.tensor).geometry
        if size == 1:
            return ()
        way, calls = chosen(self.plan, size).way, self._attended
        tokens, micro = self.part[2] * size, math.ceil(self.part[1])
        bytes_moved = numbers(way, g.heads, g.kv_heads, size) * g.head_dim * COMPUTE[self.dtype]
        bytes_moved *= calls * tokens
        turns = calls * micro
        forward = 2 if self.plan.config.train.checkpointing is True else 1  # and recomputed
        if way == HEADS:
            passes = forward + 1  # two all-to-alls in each
            return (
                Collective(
                    "heads", "all-to-all", passes * bytes_moved, 2 * passes * turns, among=size
                ),
            )
        apart: dict[str, int] = {"among": size, "stride": self.tensor}
        on = ("keys and values", "all-gather", forward * bytes_moved, forward * turns)
        return (
            Collective(*on, **apart),
            Collective("their gradients", "reduce-scatter", bytes_moved, turns, **apart),
        )

    @property
    def _attended(self) -> int:
        """The number of attentions in a micro-batch; those of a block that runs twice count twice."""
        return sum(map(self._turns, self.plan.spec.attentions))

    def _of_stages(self) -> tuple[Collective, ...]:
        """List the sends of the pipeline stage with the most traffic, as in pipeline.py: arrays and gradients."""
        borders = [self._border_bytes(one.sent) for one in self.stages[:-1]]
        if not borders:
            return ()
        on, back = [*borders, 0.0], [0.0, *borders]
        one = max(range(len(on)), key=lambda at: on[at] + back[at])
        tokens, micro = self.part[2], math.ceil(self.part[1])
        each = ("activations", on[one]), ("their gradients", back[one])
        return tuple(Collective(what, "send", size * tokens, micro) for what, size in each if size)

    def _border_bytes(self, names: Iterable[str]) -> float:
        """Count the bytes per token sent between two stages."""
        widths = [self.plan.spec.geometry.dim, *(width(self.plan, name) for name in names)]
        return sum(widths) * COMPUTE[self.dtype]

    def _memory(self, updates: str) -> dict[str, int]:
        """Divide the plan's memory estimate by the layout."""
        mine = self._owned(updates)
        estimate = self.plan.estimate(self.dtype)
        rows = max(shape.rows for shape in self.plan.course)
        whole = all(shape.accumulate % self.parts == 0 for shape in self.plan.course)
        held, mesh = dict(estimate.memory), self.mesh
        if (
            self.tensor > 1
        ):  # the residual stream is replicated, the inside of layers and the loss are sharded
            own = replace(self.plan, spec=divided(self.plan.spec, self.tensor))
            held["activations"] = own.estimate(self.dtype).memory["activations"]
            held["logits"] = held["logits"] // self.tensor
        for name in held:
            rule = name.removeprefix("optimizer state (").removesuffix(")")
            if name in ("activations", "logits"):
                held[name] = round(
                    held[name] / (1 if whole else min(self.parts, rows)) / mesh.context
                )
            elif updates != REPLICATED and rule in mine.state:
                held[name] = mine.state[rule]
        if mesh.context > 1:
            held["keys and values"] = self._gathered(rows / (1 if whole else min(self.parts, rows)))
        if mesh.pipeline > 1:
            held |= self._in_flight(held["activations"])
        if updates == SHARDED and self.ranks > 1 and COMPUTE[self.dtype] < MASTER:
            held["master weights"] = mine.parameters * MASTER
        if self.ranks > 1:  # all reduced gradients, or those of the rank's part
            held["gradients, summed"] = mine.parameters * MASTER
        if updates == FULLY and self.ranks > 1:
            held |= self._in_rows(held["activations"])
        return {name: size for name, size in held.items() if size}

    def _gathered(self, rows: float) -> int:
        """Count the bytes of a micro-batch's gathered keys and values, held until the backward pass."""
        if chosen(self.plan, self.mesh.context).way == HEADS:
            return 0  # as many as the rank's own, which they replace
        g, train = divided(self.plan.spec, self.tensor).geometry, self.plan.config.train
        calls = 1 if train.checkpointing is True else self._attended
        each = 2 * g.kv_heads * g.head_dim * COMPUTE[self.dtype]
        return round(calls * rows * train.seq_len * each)

    def _in_rows(self, activations: int) -> dict[str, int]:
        """Count the bytes of sharded weights and gradients: shards of all, and the gathered units in use.

        Whole gradients and masters of owned matrices exist in the update, when activations do not.
        """
        rows = {
            name: math.prod(info.shape[1:]) * rows_of(info.shape[0], 0, self.ranks)[1]
            for name, info in self.plan.parameters.items()
        }
        whole, itemsize = uncut(self.plan.groups), COMPUTE[self.dtype]
        shares = layout(self.plan.groups, self.ranks, weights=True)
        mine = max(sum(part.size for part in share if part.name in whole) for share in shares)
        trained = sum(size for name, size in rows.items() if name not in self.plan.frozen)
        views = bool(self.plan.views)
        ends = self._units[""]
        unit = max(size for first, size in self._units.items() if first)
        return {
            "weights": itemsize * (ends + 2 * unit),  # a unit, and the next one
            "master weights": MASTER * (sum(rows.values()) + mine * views),
            "gradients": itemsize * (ends + unit) + MASTER * max(ends, unit),
            "gradients, summed": MASTER * trained,
            "owned matrices": max(0, MASTER * mine * (2 - views) - activations),
        }

    def _in_flight(self, activations: float) -> dict[str, int]:
        """Count the bytes of micro-batches in flight in the fullest stage, and of its receive buffers."""
        micro, count = math.ceil(self.part[1]), len(self.stages)
        blocks = sum(len(one.blocks) for one in self.stages)
        at_once = [
            micro if self.mesh.schedule == GPIPE else min(micro, count - at) for at in range(count)
        ]
        shares = [len(one.blocks) / blocks for one in self.stages]
        held = max(share * many for share, many in zip(shares, at_once, strict=True))
        borders = [0.0, *(self._border_bytes(one.sent) for one in self.stages[:-1]), 0.0]
        most = max(map(sum, pairwise(borders)))  # arrays, and gradients
        return {
            "activations": round(activations * held),
            "pipeline buffers": round(most * self.part[2]),
        }

    def _assumed(self) -> Iterator[tuple[str, Any, str]]:
        card = self.card
        sheet = "the maker's data sheet" if card.name in CARDS else "--card"
        yield "peak, FLOP/s", f"{amount(card.flops)}", sheet
        own = card.utilisation != UTILISATION
        by = "--card" if own else "gpt2-124m on one H100, README"
        yield "utilisation", card.utilisation, by
        yield "within a host, GB/s", card.link / 1e9, sheet
        yield "between hosts, GB/s", card.network / 1e9, sheet
        by = "--card" if card.reached != REACHED else "all-reduce of 512 MiB, two H200"
        yield "reached of these", card.reached, by
        yield "slowed beside", SLOWED, "FSDP2 of 1.31 B on 1 and 2 H200"
        yield "spread of steps", SPREAD, "FSDP2 of 8 B on 8 and 128 H100"


__all__ = ["Forecast", "owned"]
