"""The decoder: tokens in, loss out. Without plugins it is Llama's architecture.

x       = embedding[ids], model.embed nodes (mix < norm); x0 = x
streams = model.streams nodes, each once per micro-batch
x       = blocks, with the inputs that each declares
x       = site "final", last norm
loss    = linear_cross_entropy(x, head) + terms
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minillm_core.errors import PlanError, PluginCodeError
from minillm_core.nn.attention import Attention, AttentionSpec
from minillm_core.nn.block import (
    COLUMNS,
    GATHERED,
    LABELS,
    MASKING,
    Block,
    BlockSpec,
    Omitted,
    norm_of,
    normed,
)
from minillm_core.nn.decoding import check_lookbacks, outwards
from minillm_core.nn.layers import Embedding, Linear, SwiGLU, head_of
from minillm_core.nn.module import Module, declared, named_modules, seal
from minillm_core.nn.node import ModelShape, Node, Scope, Setting, as_numbers, call_names, inputs_of
from minillm_core.nn.param import Param
from minillm_core.nn.reference import resolve, takes
from minillm_core.nn.residual import Site, SiteSpec
from minillm_core.ops.form import LossForm


@dataclass(frozen=True)
class Target:
    """A further prediction target at each position, in training only."""

    key: str
    owner: str
    weight: Setting
    offset: int | None = None  # n: the token n ahead (1 is the main target)
    field: str | None = None  # or a batch field, int32 (B, T), -1 where unsupervised
    stage: str | None = None  # staged value that is 0 once the target has ended; None: never ends
    weight_field: str | None = None  # float32 (B, T): multiplies the weight at each position

    @property
    def inputs(self) -> tuple[str, ...]:
        """The batch fields and the schedule value that the target reads."""
        return (*self.weight.inputs, *filter(None, (self.field, self.weight_field)))


@dataclass(frozen=True)
class Term:
    """An auxiliary loss, in training only: a scalar mean over the micro-batch, reported separately."""

    key: str
    owner: str
    weight: Setting
    node: Node | None = None  # computed after the last norm ...
    emitted: str | None = None  # ... or emitted by nodes of this plugin under this name, summed


@dataclass(frozen=True)
class RowChoice:
    """The selection of the rows of a micro-batch that are trained on."""

    node: Node  # scores the rows
    keep: float  # the fraction of rows to keep, those with the highest scores


@dataclass(frozen=True)
class Gathering:
    """The claim that the head, and if possible the last MLP, runs only at supervised positions."""

    owner: str
    buckets: int  # sizes: 1 / buckets of a micro-batch's positions, 2 / buckets, ... all of them


@dataclass(frozen=True)
class LossSpec:
    """The loss, resolved."""

    form: LossForm = field(default_factory=LossForm)
    form_owners: tuple[tuple[str, str], ...] = ()  # (field of the form, plugin that set it)
    targets: tuple[Target, ...] = ()  # sorted by key
    terms: tuple[Term, ...] = ()  # sorted by key
    rows: RowChoice | None = None
    weights: Node | None = None  # weighs the positions of the main target
    gather: Gathering | None = None  # None: the head is computed at every position

    @property
    def kept(self) -> float:
        """The fraction of a micro-batch's rows that is trained on."""
        return 1.0 if self.rows is None else self.rows.keep

    @property
    def whole(self) -> Node | None:
        """The node that needs the whole micro-batch: it selects rows, or sets ``whole``; None: no such node."""
        if self.rows is not None:
            return self.rows.node
        weighs = self.weights and (self.weights.cls or resolve(self.weights.reference))
        return self.weights if weighs and weighs.whole else None

    def present(self, values: Mapping[str, Any]) -> tuple[Target, ...]:
        """Return the further targets that are present at these staged values."""
        return tuple(t for t in self.targets if t.stage is None or values[t.stage])


def lookup(parameter: str) -> str:
    """Return the name of the batch entry with the index of each id among a step's table rows, int32 (B, T)."""
    return f"rows.{parameter}"


def ahead(offset: int) -> str:
    """Return the name of the batch entry with labels shifted by ``offset`` - 1, under context parallelism."""
    return f"labels.{offset}"


def shifted(ops: Any, labels: Any, offset: int) -> Any:
    """Shift labels (B, T) int32 left by ``offset`` - 1, with -1 past the row's end."""
    if offset == 1:
        return labels
    steps = offset - 1
    if steps >= labels.shape[1]:
        return ops.full_like(labels, -1)
    return ops.concat([labels[:, steps:], ops.full_like(labels[:, :steps], -1)], 1)


def stacked(ops: Any, targets: list[Any], count: int) -> Any:
    """Stack K targets (B, T) -> (K, N) int32."""
    if len(targets) == 1:
        return ops.reshape(targets[0], (1, count))
    return ops.stack([ops.reshape(target, (count,)) for target in targets], 0)


def target_weights(ops: Any, weights: list[Any], count: int) -> Any:
    """Stack the targets' weights: None, number, 0-d or field (B, T) -> None, float32 (K,) or (K, N)."""
    if all(weight is None for weight in weights):
        return None
    weights = [1.0 if weight is None else weight for weight in weights]
    fields = [len(getattr(weight, "shape", ())) == 2 for weight in weights]
    if not any(fields):
        return ops.stack([ops.scalar(weight) for weight in weights], 0)
    rows = [
        ops.reshape(w, (count,)) if whole else ops.broadcast_to(ops.scalar(w), (count,))
        for w, whole in zip(weights, fields, strict=True)
    ]
    return ops.stack(rows, 0)


@dataclass(frozen=True)
class Loop:
    """A loop over consecutive blocks, which run several times with one set of parameters."""

    owner: str
    first: int
    last: int  # inclusive
    times: Setting  # how many times they run, a whole number

    @property
    def inputs(self) -> tuple[str, ...]:
        """The schedule value that the loop reads."""
        return self.times.inputs

    def order(self, layers: int, values: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the blocks in the order they run: (layer, turn counted from 0)."""
        turns = range(int(self.times.of(values)))
        looped = [(layer, turn) for turn in turns for layer in range(self.first, self.last + 1)]
        before, behind = range(self.first), range(self.last + 1, layers)
        return [*((i, 0) for i in before), *looped, *((i, 0) for i in behind)]


@dataclass(frozen=True)
class DecoderSpec:
    """The whole model, resolved; :func:`decoder` builds it on any framework."""

    geometry: ModelShape
    tied: bool
    embed: tuple[Node, ...]
    streams: tuple[Node, ...]  # sorted so that each comes after the streams it reads
    blocks: tuple[BlockSpec, ...]
    taps: tuple[tuple[str, str], ...]  # name chosen by a plugin -> site, sorted
    final: SiteSpec | None
    final_norm: Node | Omitted | None
    loss: LossSpec
    linears: tuple[tuple[str, Node], ...] = ()  # leaf -> the node that replaces its product
    loop: Loop | None = None  # None: each block runs once

    @property
    def gathers_early(self) -> bool:
        """Whether positions may be gathered before the last MLP: only the loss reads later arrays."""
        last, loss = self.blocks[-1], self.loss
        nodes = (last.mlp, last.mlp_norm, self.final_norm, loss.weights)
        nodes += tuple(term.node for term in loss.terms)
        sites = last.site_out, self.final
        free = not any(isinstance(one, Node) for one in nodes) and last.mlp is None
        mlp = f"layers.{len(self.blocks) - 1}.mlp"  # its products may read arrays of all positions
        free = free and self.loop is None and not any(one.name == mlp for one in last.apart)
        free = free and not any(n.external for leaf, n in self.linears if leaf.startswith(mlp))
        return loss.gather is not None and free and sites == (None, None) and "out" not in last.taps

    @property
    def training_alone(self) -> tuple[str, ...]:
        """The paths of modules that only the training loss uses: their parameters are not exported."""
        read = inputs_of((self.embed, self.blocks, self.final, self.final_norm, self.linears))
        unread = []
        for node in reversed(self.streams):  # a stream's readers come before it here
            if node.name in read:
                read |= {*node.inputs}
            else:
                unread.append(f"streams.{node.name}")
        return (*sorted(unread), "terms_nodes", "rows", "weights")

    @property
    def attentions(self) -> dict[int, AttentionSpec]:
        """Layer -> the core's attention; without layers that have a plugin's own attention, or none."""
        found = {index: block.core_attention for index, block in enumerate(self.blocks)}
        return {index: one for index, one in found.items() if one is not None}


Arrays = dict[str, Any]
"""Arrays of the framework by name: a micro-batch, schedule values, or statistics."""

ScopeOf = Callable[[Arrays], Scope]
"""Builds the scope of a pass from its arrays."""


class Loss(NamedTuple):
    """The loss of a micro-batch; only ``objective`` is differentiable."""

    objective: Any  # 0-d float32, scaled
    sums: Any  # float32 (1 + targets present,): nats, main target first, unweighted
    count: Any  # 0-d float32: supervised positions of the main target
    terms: dict[str, tuple[Any, Any]]  # key -> unweighted term, number of labels it covers; 0-d
    statistics: dict[str, Any]  # path.name -> array, without gradient


class Decoder(Module):
    """The model: batch, values -> Loss."""

    def __init__(self, spec: DecoderSpec, *, checkpointing: bool) -> None:
        super().__init__()
        self.geometry = g = spec.geometry
        self.embedding = Embedding(g, tied=spec.tied)
        self.embed = {node.name: node.make(g) for node in spec.embed}
        self.streams = {node.name: node.make(g) for node in spec.streams}
        self.layers = [
            Block(replace(g, layer=index), block) for index, block in enumerate(spec.blocks)
        ]
        self.site_final = Site(g, spec.final) if spec.final else None
        self.norm = norm_of(g, spec.final_norm)
        self.head = None if spec.tied else head_of(g)
        self.terms_nodes = {
            term.key: term.node.make(g) for term in spec.loss.terms if term.node is not None
        }
        self.rows = spec.loss.rows and spec.loss.rows.node.make(g)
        self.keep = spec.loss.kept
        self.weights = spec.loss.weights and spec.loss.weights.make(g)
        self.loss = spec.loss
        self.checkpointing, self.loop = checkpointing, spec.loop
        self.gather_early = spec.gathers_early and not checkpointing
        if self.gather_early:
            self.layers[-1].inputs += (GATHERED,)
        self.tap_aliases = {
            site: tuple(name for name, its in spec.taps if its == site) for _, site in spec.taps
        }

    def forward(self, batch: Arrays, values: Arrays) -> Loss:
        """Compute the training loss of one micro-batch.

        Args:
            batch: ids, labels (B, T) int32, and the fields that nodes read.
            values: schedule values, 0-d float32, and ``normaliser``: loss scale / supervised tokens
                of the whole step, over all micro-batches and ranks.
        """
        all_losses = None
        if self.rows is not None:
            batch, all_losses = self.kept_rows(batch, values)
        return self.loss_of(batch, values, *self.hidden(batch, values), all_losses)

    def loss_of(
        self,
        batch: Arrays,
        values: Arrays,
        hidden: Any,
        scope: Scope,
        statistics: Arrays,
        all_losses: tuple[Any, Any] | None = None,
    ) -> Loss:
        """Compute the loss from the result of :meth:`hidden`; ``all_losses``: (labels, losses) of all rows."""
        ops, normaliser = self.ops, values["normaliser"]
        B, T = batch["labels"].shape
        targets, weights = [batch["labels"]], [batch.get("weights")]
        if self.weights is not None:
            losses = self.token_losses(hidden, batch["labels"])
            chosen = scope.apply(self.weights, {"x": hidden, "losses": losses})
            chosen = ops.stop_gradient(as_numbers(self.weights, chosen, (B, T)))
            weights = [chosen if weights[0] is None else chosen * weights[0]]
        for target in self.loss.present(values):
            if target.field is not None:
                targets.append(batch[target.field])
            elif (further := batch.get(ahead(target.offset or 1))) is not None:
                targets.append(further)
            else:
                targets.append(shifted(ops, batch["labels"], target.offset or 1))
            weight = target.weight.of(values)
            if target.weight_field is not None:
                weight = weight * batch[target.weight_field]
            weights.append(weight)
        rows = ops.reshape(hidden, (-1, hidden.shape[-1]))
        ids, scale = stacked(ops, targets, B * T), target_weights(ops, weights, B * T)
        if (at := batch.get(GATHERED)) is not None:  # the loss is 0 at all others
            rows = rows if self.gather_early else ops.take_rows(rows, at)  # (S, C)
            ids = ops.take(ids, at, 1)  # (K, S)
            scale = ops.take(scale, at, 1) if len(getattr(scale, "shape", ())) == 2 else scale
        head, form = self.head_weight(), self.loss.form
        total, sums, count = ops.linear_cross_entropy(rows, head, ids, scale, form)
        if all_losses is not None:  # report all rows; scale up the objective of the kept ones
            labels, every = all_losses
            positions = ops.sum(ops.astype(labels >= 0, "float32"))
            ratio = positions / ops.maximum(count, ops.like(1.0, count))
            normaliser, count = normaliser * ratio, positions
            sums = ops.stack([ops.sum(every), *(total * ratio for total in sums[1:])], 0)
        objective = total * normaliser
        of_rows = count if (whole := batch.get(LABELS)) is None else whole[0, 0]
        terms = {}
        for term in self.loss.terms:
            if term.node is not None:
                own = {"x": hidden, "head": head, "form": form.evaluated()}
                value, labels = scope.apply(self.terms_nodes[term.key], own), count
            else:
                value = sum(scope.emitted[name] for name in self.term_sources[term.key])
                labels = of_rows
            value = ops.astype(value, "float32")
            if shape := tuple(value.shape):
                where, did = f"loss.term[{term.key}]", f"returned {shape} as"
                raise PluginCodeError(term.owner, where, did=did, fix="return a scalar")
            terms[term.key] = ops.stop_gradient(value), labels
            share = labels * values["normaliser"]  # fraction of the step's labels, times loss scale
            objective = objective + value * ops.like(term.weight.of(values), value) * share
        return Loss(objective, sums, count, terms, statistics)

    def kept_rows(self, batch: Arrays, values: Arrays) -> tuple[Arrays, tuple[Any, Any]]:
        """Select rows: return the batch of the rows to train on, and labels and losses of all rows, (B, T)."""
        ops = self.ops
        with self.framework.constant():
            losses = self.losses(batch, values)
            rows = losses.shape[0]
            scores = Scope({**batch, **values}).apply(self.rows, {"losses": losses})
            scores = as_numbers(self.rows, scores, (rows,))
            indices = ops.argsort(scores * -1.0)[: max(1, round(rows * self.keep))]
        chosen = {name: ops.take(array, indices, 0) for name, array in batch.items()}
        return chosen, (batch["labels"], losses)

    def token_losses(self, hidden: Any, labels: Any) -> Any:
        """Compute each position's held-out loss from hidden (B, T, C): nats, float32 (B, T), no gradient."""
        (B, T, C), head = hidden.shape, self.head_weight()
        rows, ids = self.ops.reshape(hidden, (B * T, C)), self.ops.reshape(labels, (B * T,))
        losses = self.ops.token_losses(rows, head, ids, self.loss.form.evaluated())
        return self.ops.reshape(losses, (B, T))

    def losses(self, batch: Arrays, values: Arrays) -> Any:
        """Compute each position's loss in nats, float32 (B, T), 0 where unsupervised."""
        return self.token_losses(self.hidden(batch, values)[0], batch["labels"])

    def all_logits(self, batch: Arrays, values: Arrays) -> Any:
        """Compute the logits after each position, float32 (B, T, V)."""
        hidden = self.hidden(batch, values)[0]
        B, T, C = hidden.shape
        rows, form = self.ops.reshape(hidden, (B * T, C)), self.loss.form.evaluated()
        return self.ops.reshape(self.ops.logits(rows, self.head_weight(), form), (B, T, -1))

    def scores(self, batch: Arrays, values: Arrays) -> tuple[Any, Any]:
        """Compute the nats of each label, and the largest logit minus the label's logit, (B, T) each."""
        logits, ops = self.all_logits(batch, values), self.ops
        labels = ops.expand_dims(ops.maximum(batch["labels"], 0), -1)
        own = ops.take_along_axis(logits, labels, -1)[..., 0]
        return ops.logsumexp(logits, -1) - own, ops.max(logits, -1) - own

    def evaluate(self, batch: Arrays, values: Arrays) -> tuple[Any, Any]:
        """Compute the held-out loss: (sum of nats, number of predictions) of the main target, 0-d float32."""
        ops, (hidden, _, _) = self.ops, self.hidden(batch, values)
        rows = ops.reshape(hidden, (-1, hidden.shape[-1]))
        ids = ops.reshape(batch["labels"], (1, -1))
        if (at := batch.get(GATHERED)) is not None:
            rows, ids = ops.take_rows(rows, at), ops.take(ids, at, 1)
        head, form = self.head_weight(), self.loss.form.evaluated()
        _, sums, count = ops.linear_cross_entropy(rows, head, ids, None, form)
        return sums[0], count

    def logits(self, batch: Arrays, values: Arrays, at: Any, scope_of: ScopeOf = Scope) -> Any:
        """Compute the logits at column ``at`` (int32, (1,)) of each row, float32 (B, V).

        ``scope_of`` the ``scope`` of a KVCache: the batch's columns follow the cached ones.
        """
        hidden, _, _ = self.hidden(batch, values, scope_of)
        B, _, C = hidden.shape
        row = self.ops.reshape(self.ops.take(hidden, at, 1), (B, C))
        return self.ops.logits(row, self.head_weight(), self.loss.form.evaluated())

    def hidden(
        self, batch: Arrays, values: Arrays, scope_of: ScopeOf | None = None
    ) -> tuple[Any, Scope, Arrays]:
        """Return the activations (B, T, C) after the last norm, the scope after the blocks, and the statistics.

        In training the activations are (S, C) if ``gather_early`` is set and the batch has gathered positions.
        """
        scope = self.scope(batch, values, scope_of)
        x = self.embedded(scope)
        self.compute_streams(self.streams, scope)
        x, statistics = self.run_blocks(self.order(values), x, scope)
        return self.before_head(x, scope), scope, statistics | self.emitted(scope)

    def scope(self, batch: Arrays, values: Arrays, scope_of: ScopeOf | None = None) -> Scope:
        """Build the scope of a batch: the arrays that blocks and nodes may read."""
        make: Any = scope_of or (self.framework.scope_of if COLUMNS in batch else Scope)
        scope = make({GATHERED: None, MASKING: batch.get("documents"), **batch, **values})
        for name, ids in self.lookups.items():  # training: places among the step's table rows
            scope.reads[lookup(name)] = batch.get(lookup(name), batch[ids])
        return scope

    def embedded(self, scope: Scope) -> Any:
        """Compute the input of the first block, (B, T, C); nodes may read it as x0."""
        x = self.embedding(scope.reads["ids"])
        for node in self.embed.values():
            x = scope.apply(node, {"x": x}, like=("x",))
        scope.reads["x0"] = x
        return x

    def compute_streams(self, names: Iterable[str], scope: Scope) -> None:
        """Compute these streams, ordered so that each follows the streams that it reads."""
        for name in names:
            scope.reads[name] = scope.apply(self.streams[name], {})

    def run_blocks(
        self, order: Iterable[tuple[int, int]], x: Any, scope: Scope
    ) -> tuple[Any, Arrays]:
        """Run blocks, given as (layer, turn), on x (B, T, C); return x and the blocks' statistics."""
        statistics: Arrays = {}
        for layer, turn in order:
            block = self.layers[layer]
            x, *rest = scope.run_block(block, x, checkpointing=self.checkpointing, turn=turn)
            read = (*block.tap_names, *block.stream_names)
            names = (*read, *block.term_names, *block.statistic_names)
            for name, value in zip(names, rest, strict=True):
                if name in read:
                    for known_as in (name, *self.tap_aliases.get(name, ())):
                        scope.reads[known_as] = value
                elif name in block.term_names:
                    scope.emitted[name] = value
                else:  # stop_gradient comes last: on MLX an earlier one corrupts the gradients
                    statistics[name] = self.ops.stop_gradient(value)
        return x, statistics

    def before_head(self, x: Any, scope: Scope) -> Any:
        """Compute the head's input from the last block's x: the final site, then the last norm."""
        if self.site_final is not None:
            x = self.site_final(x, None, scope)
        return normed(self.norm, x, scope)

    def emitted(self, scope: Scope) -> Arrays:
        """Return the statistics emitted by nodes outside the blocks."""
        names = (name for name in self.statistic_names if name in scope.emitted)
        return {name: self.ops.stop_gradient(scope.emitted[name]) for name in names}

    def order(self, values: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the blocks in the order they run: (layer, turn counted from 0)."""
        if self.loop is None:
            return [(layer, 0) for layer in range(len(self.layers))]
        return self.loop.order(len(self.layers), values)

    def head_weight(self) -> Any:
        """Return the weight of the head, or of the embedding that it is tied to, (V, C)."""
        return self.embedding.weight if self.head is None else self.head.weight


def _no_leaf(
    spec: DecoderSpec, leaf: str, node: Node, built: Mapping[str, Any], leaves: Mapping[str, Any]
) -> PlanError:
    """Return the error for a claim on the product of a missing leaf; name the plugin that replaced it."""
    above = next((path for path in outwards(leaf) if path in built), "")
    owner, verb = getattr(built.get(above), "owner", None), "made"
    if above.startswith("layers.") and leaf != above:
        _, layer, part = leaf.split(".")[:3]
        if isinstance(omitted := getattr(spec.blocks[int(layer)], part, None), Omitted):
            above, owner, verb = f"layers.{layer}.{part}", omitted.owner, "left out"
    fix = "leaves are " + ", ".join(sorted(leaves)[:4]) + ", ..."
    what = f"plugin '{node.owner}' replaces the product of '{leaf}', which is not a leaf"
    if owner:
        what = f"{what}: '{above}' is {verb} by plugin '{owner}'"
        fix = f"leave out '{owner}' or '{node.owner}', or keep '{node.owner}' out of it; {fix}"
    return PlanError(what, where=node.slot, fix=fix)


def decoder(spec: DecoderSpec, *, checkpointing: bool = False) -> Any:
    """Build the model on the current framework, set each module's path and claims, and seal it.

    Args:
        spec: the model.
        checkpointing: recompute each block in the backward pass.

    Raises:
        PlanError: a claim on the product of a module that is not a Linear leaf of this model, or a
            module that declares terms or statistics where nothing collects them.
    """
    model: Any = Decoder(spec, checkpointing=checkpointing)
    built = dict(named_modules(model))
    leaves = {path: m for path, m in built.items() if isinstance(m, Linear)}
    for leaf, node in spec.linears:
        if leaf not in leaves:
            raise _no_leaf(spec, leaf, node, built, leaves)
        leaves[leaf].product = node.make(spec.geometry)
        if node.external:
            block, _, name = leaf.rpartition(".")[0].rpartition(".")
            if not isinstance(built[f"{block}.{name}"], (Attention, SwiGLU)):
                raise PlanError(
                    f"plugin '{node.owner}' reads '{node.external[0]}' in the product of '{leaf}', "
                    "which is given x and the weight alone",
                    where=node.slot,
                    fix="products of plain attention (q, k, v, o) and SwiGLU (gate, up, down) can read it",
                )
            built[block].inputs = tuple(sorted({*built[block].inputs, *node.external}))
    modules = dict(named_modules(model))
    for path, module in modules.items():
        module.path = path
        _check_emits(path, module)
    check_lookbacks(modules)
    further = inputs_of((spec.final, spec.final_norm, spec.loss))
    for index, block in reversed([*enumerate(model.layers)]):
        computed = spec.blocks[index].computed
        block.inputs = tuple(name for name in block.inputs if name not in computed)
        block.stream_names = tuple(sorted(computed & further))
        further |= {*block.inputs}
        below = [m for path, m in modules.items() if path.startswith(f"layers.{index}.")]
        block.tap_names = tuple(f"layers.{index}.{tap}" for tap in block.taps)
        block.term_names = emissions(below, "terms")
        block.statistic_names = emissions(below, "statistics")
    outside = [m for path, m in modules.items() if not path.startswith("layers.")]
    model.statistic_names = emissions(outside, "statistics")
    model.term_sources = {
        term.key: tuple(
            sorted(
                f"{m.path}.{term.emitted}"
                for m in modules.values()
                if getattr(m, "owner", None) == term.owner and term.emitted in m.terms
            )
        )
        for term in spec.loss.terms
    }
    model.lookups = _lookups(model)
    seal(model)
    return model


def _lookups(model: Any) -> dict[str, str]:
    """Return table -> batch field for tables with ``rows=``; bind that argument to the row indices instead.

    Raises:
        PlanError: a table sets ``rows=``, and its module is not a stream, or has no such argument.
    """
    found: dict[str, str] = {}
    streams = {id(stream) for stream in model.streams.values()}  # MLX compares modules by arrays
    for name, module, _, param in declared(model, Param):
        if not param.rows:
            continue
        arguments = call_names(type(module).forward)
        if id(module) not in streams or param.rows not in arguments:
            raise PlanError(
                f"{type(module).__name__} has a table with rows='{param.rows}'",
                where=name,
                fix="declare the table in a stream (model.stream), and rows= as an argument of its forward",
            )
        at = arguments.index(param.rows)
        found[name] = module.bound[at]
        module.bound = (*module.bound[:at], lookup(name), *module.bound[at + 1 :])
    return found


def _check_emits(path: str, module: Any) -> None:
    """Check that only nodes declare terms, statistics or kept arrays: nothing collects those of other modules."""
    if not (module.terms or module.statistics or module.keeps):
        return
    if not hasattr(module, "owner") or path.endswith(".product"):
        raise PlanError(
            f"{type(module).__name__} at {path} has terms or statistics, or keeps arrays, but is not "
            "a node that a block or the model calls",
            fix="name them in the node's own class, and return them from its forward",
        )
    cls, kinds = type(module), module.statistics
    what = f"plugin '{module.owner}': {cls.__name__} has statistics, "
    if kinds and (cls.next_state is Module.next_state or not takes(cls.next_state, kinds)):
        fix = f"def next_state(self, {', '.join(kinds)}), which returns new State, or {{}}"
        raise PlanError(what + "but no next_state that takes them", where=path, fix=fix)
    if unknown := {*kinds.values()} - {"sum", "mean", "max"}:
        raise PlanError(what + f"reduced by {min(unknown)!r}", where=path, fix="sum, mean or max")


def emissions(modules: list[Any], kind: str) -> tuple[str, ...]:
    """Return path.name of every term or statistic that ``modules`` emit, sorted."""
    return tuple(sorted(f"{m.path}.{name}" for m in modules for name in getattr(m, kind)))
