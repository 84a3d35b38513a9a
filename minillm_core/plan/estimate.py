"""The cost of a plan: parameters, FLOPs and bytes, part by part, from declarations only.

FLOPs are the model's, forward and backward: 6 per multiplied parameter and token (4 if the parameter is
frozen and has no gradient), and 12 T H D per layer for attention over T keys, whether or not a kernel skips
the keys hidden by the causal mask. Recomputation is not counted. MFU = tokens/s x flops_per_token / peak.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minillm_core.nn.decoder import decoder
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import named_modules
from minillm_core.plugins.builders import ParamInfo

if TYPE_CHECKING:
    from minillm_core.plan.plan import Plan
    from minillm_core.plugins.builders.loss import Reference

ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER = 4  # float32

CORE = ("embedding", "attention.q", "attention.k", "attention.v", "attention.o")
CORE += ("attention.scores", "mlp", "norms", "head")
"""The core's parts of the model, in the order of computation."""


@dataclass(frozen=True)
class Part:
    """One part of the model: a part of the core, or all modules of a plugin."""

    name: str
    parameters: int  # number of parameters, frozen ones included
    multiplied: int  # parameters that a token is multiplied with; a tied head's count under head
    flops: int  # per token, forward and backward


@dataclass(frozen=True)
class RuleCost:
    """The arrays and parameters that one update rule updates."""

    name: str
    arrays: int
    parameters: int  # number of elements
    state_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The cost of a plan on one device, in compute dtype ``dtype``."""

    dtype: str
    parts: tuple[Part, ...]
    rules: tuple[RuleCost, ...]
    memory: Mapping[str, int]  # weights, master weights, gradients, ... -> bytes
    tokens_per_step: int
    uncounted: tuple[str, ...] = ()  # plugin computations that cannot be counted
    frozen: int = 0  # number of frozen parameters
    # part -> share of its FLOPs spent only at supervised tokens
    gathered: Mapping[str, float] = field(default_factory=dict)
    # table updated by rows -> (most rows in a step, all rows)
    tables: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pending: int = 0  # checkpoint bytes of the pending updates of those tables
    viewed: int = 0  # checkpoint bytes of views (``optimizer.view``)
    scores: Mapping[int, int] = field(default_factory=dict)  # layer -> FLOPs of attention.scores

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, frozen ones included."""
        return sum(part.parameters for part in self.parts)

    @property
    def multiplied(self) -> int:
        """N in 6 N: the parameters that a token is multiplied with, a tied head's counted once."""
        return sum(part.multiplied for part in self.parts)

    @property
    def flops_per_token(self) -> int:
        """FLOPs per token, forward and backward, if every token is supervised."""
        return sum(part.flops for part in self.parts)

    @property
    def flops_per_label(self) -> int:
        """The part of a token's FLOPs that is spent only if the token is supervised."""
        return round(sum(share * self.part(name).flops for name, share in self.gathered.items()))

    @property
    def flops_per_step(self) -> int:
        """FLOPs of one optimizer step on one device."""
        return self.flops_per_token * self.tokens_per_step

    @property
    def bytes(self) -> int:
        """The sum of ``memory``: approximately the peak of a step."""
        return sum(self.memory.values())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's arrays: master weights and optimizer state."""
        state = sum(rule.state_bytes for rule in self.rules)
        return MASTER * self.parameters + state + self.pending + self.viewed

    def part(self, name: str) -> Part:
        """Return the part of that name, or an empty part."""
        return next((p for p in self.parts if p.name == name), Part(name, 0, 0, 0))

    def data(self) -> dict[str, Any]:
        """Return the estimate as JSON."""
        numbers = ("parameters", "frozen", "multiplied", "flops_per_token", "flops_per_step")
        return {
            **{name: getattr(self, name) for name in ("dtype", *numbers, "bytes")},
            "parts": _by_name(self.parts),
            "rules": _by_name(self.rules),
            "memory": dict(self.memory),
            "uncounted": list(self.uncounted),
            **({"gathered": dict(self.gathered)} if self.gathered else {}),
            **({"viewed": self.viewed} if self.viewed else {}),
            **({"tables": {k: [*v] for k, v in self.tables.items()}} if self.tables else {}),
        }


def _by_name(entries: Iterable[Part | RuleCost]) -> dict[str, dict[str, Any]]:
    return {one.name: {k: v for k, v in vars(one).items() if k != "name"} for one in entries}


def vocabulary_note(estimate: Estimate) -> str | None:
    """Return a note if the vocabulary has most of the parameters, else None."""
    held = estimate.part("embedding").parameters + estimate.part("head").parameters
    if held <= estimate.parameters / 2:
        return None
    own = estimate.part("head").parameters
    who = "the embedding and the head hold" if own else "the embedding holds"
    return (
        f"{who} {held / estimate.parameters:.0%} of the parameters: a smaller model.vocab would "
        "leave more for the blocks"
    )


def estimate(plan: Plan, dtype: str | None = None, *, dense_logits: bool = False) -> Estimate:
    """Estimate the cost of a plan.

    Args:
        plan: the plan.
        dtype: float32, bfloat16 or float16; None: train.dtype, float32 if that is auto.
        dense_logits: the loss kernel keeps all logits at once; chunked kernels keep almost none.

    Raises:
        ValueError: an unknown compute dtype.
    """
    if dtype is None:
        dtype = plan.config.train.dtype.replace("auto", "float32")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(ITEMSIZE)}")
    model = decoder(plan.spec)
    scores, uncounted = _scores(plan, model)
    rules = tuple(_rules(plan))
    return Estimate(
        dtype=dtype,
        parts=tuple(_with_selection(plan, list(_parts(plan, model, sum(scores.values()))))),
        rules=rules,
        memory=_memory(plan, model, rules, ITEMSIZE[dtype], dense_logits),
        tokens_per_step=plan.tokens_per_step,
        uncounted=uncounted,
        frozen=plan.num_frozen,
        gathered=_gathered(plan),
        tables=_tables(plan),
        pending=MASTER * sum(plan.parameters[name].size for name in plan.by_rows),
        viewed=MASTER * sum(plan.parameters[name].size for name in plan.views),
        scores=scores,
    )


def _tables(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return table -> (most rows in a step, all rows) for each table that is updated by rows."""
    ids = max(shape.tokens for shape in plan.course)
    rows = {name: plan.parameters[name].shape[0] for name in plan.by_rows}
    return {name: (min(ids, count), count) for name, count in rows.items()}


def _gathered(plan: Plan) -> dict[str, float]:
    """Return part -> the share of its FLOPs spent only at supervised tokens."""
    if plan.spec.loss.gather is None:
        return {}
    plain = sum(block.mlp is None for block in plan.spec.blocks)
    narrow = plan.spec.gathers_early and plan.config.train.checkpointing is not True
    return {"head": 1.0} | ({"mlp": 1 / plain} if narrow else {})


def _parts(plan: Plan, model: Any, scores: int) -> Iterator[Part]:
    parameters: Counter[str] = Counter()
    multiplied: Counter[str] = Counter()
    still: Counter[str] = Counter()  # frozen parameters among the multiplied ones
    leaves = ((path, m) for path, m in named_modules(model) if isinstance(m, Linear))
    shares = {f"{path}.weight": leaf.share for path, leaf in leaves}
    for info in plan.parameters.values():
        name = _part_of(info)
        parameters[name] += info.size
        if len(info.shape) > 1 and not info.role.startswith("embedding"):
            layer = info.name.split(".")[1] if info.name.startswith("layers.") else "-1"
            turns = plan.turns.get(int(layer), (1.0, 1))[0]  # of its block in a step, on average
            count = round(info.size * shares.get(info.name, 1.0) * turns)
            multiplied[name] += count
            still[name] += count if info.name in plan.frozen else 0
        # look-ups and scales along one axis count as free
    if plan.spec.tied:
        multiplied["head"] = plan.parameters["embedding.weight"].size
        still["head"] = multiplied["head"] if "embedding.weight" in plan.frozen else 0
    for name in (*CORE, *sorted({*parameters} - {*CORE})):
        flops = (
            6 * multiplied[name] - 2 * still[name] + (scores if name == "attention.scores" else 0)
        )
        if parameters[name] or flops:
            yield Part(name, parameters[name], multiplied[name], flops)


def _with_selection(plan: Plan, parts: list[Part]) -> Iterator[Part]:
    """Yield the parts at the cost of the kept rows, then the extra passes: selection, weights, references."""
    loss, total = plan.spec.loss, sum(part.flops for part in parts)
    yield from (replace(part, flops=round(part.flops * loss.kept)) for part in parts)
    if loss.rows is not None:
        yield Part("loss.rows", 0, 0, total // 3)
    if loss.weights is not None:
        head = plan.spec.geometry.dim * plan.spec.geometry.vocab
        yield Part("loss.weights", 0, 0, round(2 * head * loss.kept))
    for one in plan.references:
        there = one.model.plan.with_train(seq_len=plan.config.train.seq_len)
        yield Part(f"reference '{one.name}'", 0, 0, there.estimate().flops_per_token // 3)


def _part_of(info: ParamInfo) -> str:
    if info.owner != "core":
        return info.owner
    first = info.role.partition(".")[0]
    return {"attention": info.role, "norm": "norms"}.get(first, first)


def _scores(plan: Plan, model: Any) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return the FLOPs per token of q k^T and of its product with v, by layer; and the uncounted parts.

    If the row length changes, this is the mean over the run's tokens; windows are those at its end.
    """
    geometry, tokens = plan.spec.geometry, Counter[int]()
    for shape, steps in plan.course.items():
        tokens[shape.seq_len] += shape.tokens * steps
    width = geometry.heads * geometry.head_dim
    found, uncounted = dict[int, int](), []
    attentions = plan.spec.attentions
    for index, block in enumerate(model.layers):
        sees, most = attentions.get(index, plan.spec.blocks[index].seen), math.inf
        if sees.window is not None and sees.window.value is not None:
            _, schedule = plan.schedules[sees.window.value]
            most = int(schedule.at(1.0, plan.schedule))
        elif sees.window is not None:
            most = int(sees.window.constant or 0)
        if index in attentions:
            # a layout: seq_len x stretch positions of heads / stretch heads each
            layout = block.attention.layout
            stretch = 1 if layout is None else layout.stretch
            count = getattr(block.attention.core, "flops", None)
        elif block.attention is not None:
            stretch, count = 1, getattr(block.attention, "flops", None)
            if count is None:
                uncounted.append(f"layers.{index}.attention of '{block.attention.owner}'")
                continue
        else:
            continue
        each = sum(min(length * stretch, most) * n for length, n in tokens.items()) / tokens.total()
        one = 12 * width * each if count is None else stretch * count(each)
        found[index] = round(one * plan.turns.get(index, (1, 1))[0])
    return found, tuple(uncounted)


def _rules(plan: Plan) -> Iterator[RuleCost]:
    for name in sorted({group.rule.name for group in plan.groups}):
        groups = [group for group in plan.groups if group.rule.name == name]
        members = [member.name for group in groups for member in group.members]
        states = [entries for group in groups for entries in group.state_arrays().values()]
        state = sum(one.nbytes for entries in states for one in entries.values())
        size = sum(plan.parameters[member].size for member in members)
        yield RuleCost(name, len(members), size, state)


def _memory(
    plan: Plan, model: Any, rules: tuple[RuleCost, ...], itemsize: int, dense_logits: bool
) -> dict[str, int]:
    """Return kind -> bytes; float32 has only master weights, lower precision none of frozen parameters."""
    count, low = plan.num_parameters, itemsize < MASTER
    trained = count - plan.num_frozen
    # elements of tables outside the most rows that a step reads
    tables = ((plan.parameters[name].size, *of) for name, of in _tables(plan).items())
    unseen = sum((rows - seen) * size // rows for size, seen, rows in tables)
    tokens = max(shape.rows * shape.seq_len for shape in plan.course)  # of a micro-batch
    return {
        "weights": (count - unseen) * itemsize if low else 0,
        "master weights": (trained if low else count) * MASTER,
        # the sum, and the gradients of a micro-batch
        "gradients": (trained - unseen) * (MASTER + (itemsize if low else 0)),
        **{f"optimizer state ({rule.name})": rule.state_bytes for rule in rules},
        "activations": round(tokens * plan.spec.loss.kept) * itemsize * _activations(plan, model),
        "logits": tokens * itemsize * plan.spec.geometry.vocab if dense_logits else 0,
        **{f"reference '{one.name}'": _model_bytes(plan, one, itemsize) for one in plan.references},
    }


def _model_bytes(plan: Plan, one: Reference, itemsize: int) -> int:
    """Return the bytes of a reference model: its weights, and its output for a micro-batch, float32."""
    train, each = plan.config.train, plan.spec.geometry.vocab if one.gives == "logits" else 1
    return one.model.plan.num_parameters * itemsize + 4 * train.rows * train.seq_len * each


def _activations(plan: Plan, model: Any) -> int:
    """Return the number of activations per token kept for the backward pass."""
    dim = plan.spec.geometry.dim
    blocks = [
        _kept(block, dim, selective=plan.config.train.checkpointing == "selective")
        for index, block in enumerate(model.layers)
        for _ in range(plan.turns.get(index, (1, 1))[1])
    ]
    if plan.config.train.checkpointing is True:
        blocks = [dim] * len(blocks) + [max(blocks)]  # all inputs, and one recomputed block
    # the streams, and the inputs of the first block and of the last norm
    return sum(blocks) + dim * (2 + len(plan.spec.streams))


def _kept(block: Any, dim: int, *, selective: bool) -> int:
    """Return a block's activations per token: results of products and norms, inputs of the last products."""
    leaves = [m for _, m in named_modules(block) if isinstance(m, Linear)]
    kept = sum(round(leaf.out_features * leaf.share) for leaf in leaves)
    if block.plain_attention:
        kept += block.attention.o.in_features
    if selective:
        return kept
    kept += sum(dim for norm in (block.attention_norm, block.mlp_norm) if norm is not None)
    if block.plain_mlp and block.mlp is not None:
        kept += block.mlp.down.in_features
    return kept
