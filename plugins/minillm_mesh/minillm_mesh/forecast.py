"""``minillm plan --gpus N``: how N cards would divide a run, what each holds and sends, and what that costs.

No GPU is needed: bytes and FLOPs are the plan's own estimate, divided as the layout divides them, and
seconds are those of the cost model (cost.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from minillm_core import ConfigError, Plan
from minillm_core.commands import amount, columns, counted, sized
from minillm_core.inspection import Group
from minillm_mesh.cost import (
    CARDS,
    DEFAULT,
    REACHED,
    SLOWED,
    SPREAD,
    UTILISATION,
    Card,
    Exchange,
    Times,
    Work,
    card_of,
    sent,
    times,
)
from minillm_mesh.layout import ITERATIONS, Part, layout

MASTER = 4  # bytes of a number in float32
COMPUTE = {"float32": 4, "bfloat16": 2, "float16": 2}  # dtype -> bytes of a number

BACKWARD = 2 / 3
"""Share of a micro-batch's computing that is its backward pass."""

SHARDED, REPLICATED = "sharded", "replicated"


@dataclass(frozen=True)
class Owned:
    """What a rank looks after of the updates: of each figure that of the rank which has most."""

    matrices: int  # updated whole
    of_matrices: int  # there are
    parameters: int  # numbers
    state: Mapping[str, int]  # rule -> bytes, of the rank that has most bytes
    flops: float  # of matrix stages


def owned(plan: Plan, ranks: int) -> Owned:
    """Look at the parts that ranks update; 1: everything is of one."""
    groups = {member.name: group for group in plan.groups for member in group.members}
    shares = layout(plan.groups, ranks)
    states = [_states(share, groups) for share in shares]
    whole = [[part for part in share if groups[part.name].rule.stacked] for share in shares]
    return Owned(
        matrices=max(map(len, whole)),
        of_matrices=sum(map(len, whole)),
        parameters=max(sum(part.size for part in share) for share in shares),
        state=max(states, key=lambda state: sum(state.values())),
        flops=max(sum(_flops(groups[part.name]) for part in parts) for parts in whole),
    )


def _states(parts: Iterable[Part], groups: Mapping[str, Group]) -> dict[str, int]:
    """Count the bytes of the state that parts have, by rule."""
    found: dict[str, float] = {}
    for part in parts:
        group = groups[part.name]
        bytes_kept = sum(one.nbytes for its in group.kept().values() for one in its.values())
        numbers = len(group.members) * math.prod(group.members[0].shape)
        name = group.rule.name
        found[name] = found.get(name, 0.0) + bytes_kept * part.size / max(numbers, 1)
    return {name: round(size) for name, size in found.items()}


def _flops(group: Group) -> float:
    """Count those of one member's matrix stages: three products an iteration, as Newton-Schulz has."""
    shape = group.shape
    short, long = sorted((shape[0], math.prod(shape[1:])))
    turns = sum(
        dict(stage.arguments).get("steps", ITERATIONS) / stage.every
        for _, _, stage in group.rule.stages
        if stage.needs == "matrix"
    )
    return group.blocks * turns * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True)
class Divided:
    """One way of dividing a run: what a card holds, does and sends."""

    updates: str  # SHARDED, REPLICATED
    owned: Owned
    memory: Mapping[str, int]  # part -> bytes
    work: Work
    times: Times

    @property
    def bytes(self) -> int:
        """Of a card's memory, all together."""
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
                    "sent_bytes": round(sent(one.kind, one.size, ranks)),
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

    @cached_property
    def part(self) -> tuple[float, float, float]:
        """Rows of a micro-batch and micro-batches of a step in one rank, and its tokens, on the mean."""
        (shape, *_) = self.plan.course
        whole = shape.accumulate % self.ranks == 0
        rows = shape.rows / (1 if whole else self.ranks)
        micro = shape.accumulate / (self.ranks if whole else 1)
        return rows, micro, self.plan.tokens_per_step / self.ranks

    @cached_property
    def layouts(self) -> dict[str, Divided]:
        """The layout of the settings first, then the other."""
        asked = self.plan.config.mesh.shard
        first = (REPLICATED, SHARDED) if asked == "off" else (SHARDED, REPLICATED)
        return {name: self._layout(name) for name in first}

    @property
    def chosen(self) -> Divided:
        """The layout of the settings."""
        return next(iter(self.layouts.values()))

    @cached_property
    def alone(self) -> Times:
        """A step of the same tokens on one card."""
        return times(self._work(owned(self.plan, 1), self.ranks, ()), 1, self.card)

    @property
    def of_linear(self) -> float:
        """Tokens a second, of those of one card times the number of cards."""
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
            "tokens_per_second": self.plan.tokens_per_step / one.times.total,
            "of_linear": self.of_linear,
            **one.data(self.ranks),
            "otherwise": other.data(self.ranks),
            "assumed": {name: {"value": v, "source": why} for name, v, why in self._assumed()},
        }

    def shown(self) -> Iterator[Table]:
        """Make the tables that a person reads, 80 columns wide at least."""
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
                size = sized(sent(exchange.kind, exchange.size, self.ranks))
                taken = f"{1e3 * each.times.alone[exchange.what]:.3g} ms"
                beside = "backward pass" if exchange.beside else "nothing"
                what = f"{each.updates}: {exchange.what}"
                moved.add_row(what, exchange.kind, size, taken, beside)
        yield moved
        assumed = columns("assumed", ">", "by")
        for name, value, why in self._assumed():
            assumed.add_row(name, value if isinstance(value, str) else f"{value:g}", why)
        yield assumed

    def _facts(self, one: Divided, other: Divided) -> Iterator[tuple[str, str]]:
        card, ranks = self.card, self.ranks
        hosts = math.ceil(ranks / card.host)
        yield f"{ranks:,} GPUs", f"{card.name}, {counted(hosts, 'host')} of {min(ranks, card.host)}"
        rows, micro, tokens = self.part
        many = "micro-batch" if micro == 1 else "micro-batches"
        whole = f"{micro:g} {many} of {rows:g} rows, " if rows.is_integer() else ""
        yield (
            "layout",
            f"{ranks:,} data ranks; of a step each has {whole}{tokens:,.0f} tokens, "
            f"{amount(one.work.flops)}FLOP",
        )
        yield "updates", self._updates(one)
        t, per_second = one.times, self.plan.tokens_per_step / one.times.total
        yield (
            "step",
            f"about {1e3 * t.total:,.3g} ms: {1e3 * t.computing:,.3g} computing, {1e3 * t.update:.2g} "
            f"update, {1e3 * t.exposed:.2g} communication, {1e3 * t.slowed:.2g} slowed by it, "
            f"{1e3 * t.waiting:.2g} waiting for the slowest; {amount(per_second)}tokens/s, "
            f"{self.of_linear:.2f} of linear",
        )
        yield "communication", f"{t.share:.1%} of the step's time"
        asked = "off" if other.updates == REPLICATED else "updates"
        yield (
            f"mesh.shard={asked}",
            f"about {1e3 * other.times.total:,.3g} ms, {other.times.share:.1%} communication, "
            f"{sized(other.bytes)} a card",
        )
        if one.bytes > card.memory:
            yield (
                "does not fit",
                f"{sized(one.bytes)} of {sized(card.memory)} a card: fewer train.rows",
            )

    def _updates(self, one: Divided) -> str:
        if one.updates == REPLICATED:
            return "each rank updates every parameter, and has all of the optimizer's state"
        mine, trained = one.owned, self.plan.num_parameters - self.plan.num_frozen
        matrices = ""
        if mine.of_matrices:
            matrices = f"{mine.matrices} of {mine.of_matrices} matrices whole, "
        return (
            f"a rank owns {matrices}{amount(mine.parameters)} of {amount(trained)} numbers with "
            f"their state ({mine.parameters / max(trained, 1):.1%}), at most"
        )

    def _layout(self, updates: str) -> Divided:
        alone = updates == REPLICATED or self.ranks == 1
        mine = owned(self.plan, 1 if alone else self.ranks)
        work = self._work(mine, 1, self._exchanges(updates))
        return Divided(
            updates, mine, self._memory(updates, mine), work, times(work, self.ranks, self.card)
        )

    def _work(self, mine: Owned, parts: int, exchanges: tuple[Exchange, ...]) -> Work:
        """Count what a card does that owns ``mine``, of ``parts`` ranks' tokens."""
        flops = self.plan.estimate(self.dtype).flops_per_token * self.part[2] * parts
        moved = mine.parameters * (3 * MASTER + COMPUTE[self.dtype]) + 2 * sum(mine.state.values())
        return Work(flops, mine.flops, moved, exchanges)

    def _exchanges(self, updates: str) -> tuple[Exchange, ...]:
        """List the collectives of a step, as torch_ranks.py makes them."""
        numbers = self.plan.num_parameters - self.plan.num_frozen
        gradients, weights = MASTER * numbers, COMPUTE[self.dtype] * numbers
        if updates == REPLICATED:
            return (Exchange("gradients", "all-reduce", gradients),)
        return (
            Exchange("gradients", "reduce-scatter", gradients),
            Exchange("weights", "all-gather", weights),
        )

    def _memory(self, updates: str, mine: Owned) -> dict[str, int]:
        """Divide the plan's estimate as the layout does."""
        estimate = self.plan.estimate(self.dtype)
        rows = max(shape.rows for shape in self.plan.course)
        whole = all(shape.accumulate % self.ranks == 0 for shape in self.plan.course)
        held = dict(estimate.memory)
        for name in held:
            rule = name.removeprefix("optimizer state (").removesuffix(")")
            if name in ("activations", "logits") and not whole:
                held[name] = round(held[name] / min(self.ranks, rows))
            elif updates == SHARDED and rule in mine.state:
                held[name] = mine.state[rule]
        if updates == SHARDED and self.ranks > 1 and COMPUTE[self.dtype] < MASTER:
            held["master weights"] = mine.parameters * MASTER
        if self.ranks > 1:  # what comes back: the sums, or those of the rank's own part
            held["gradients, summed"] = mine.parameters * MASTER
        return {name: size for name, size in held.items() if size}

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


def forecast(plan: Plan, gpus: int, card: str | None, dtype: str) -> Forecast:
    """Forecast a plan on several cards.

    Args:
        plan: of the command.
        gpus: how many, 1 to 1,024.
        card: as ``--card`` names it; None: an H200.
        dtype: of the compute.

    Raises:
        ConfigError: there is no such card, or the model is not meant for so many, or for divided weights.
    """
    if plan.config.mesh.shard == "weights":
        raise ConfigError(
            "there is no forecast of divided weights",
            where="mesh.shard=weights",
            fix="plan with mesh.shard=updates; docs/scale.md says what dividing weights takes and sends",
        )
    found = Forecast(plan, gpus, card_of(card or DEFAULT), dtype)
    _ = found.layouts
    return found


__all__ = ["Forecast", "forecast", "owned"]
