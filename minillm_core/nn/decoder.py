"""The decoder: tokens in, loss out. Llama-shaped when no plugin has claimed anything.

x       = embedding[ids], model.embed nodes (mix < norm); x0 = x
streams = model.streams nodes, each once a micro-batch
x       = blocks, with the reads that each declares
x       = site "final", last norm
loss    = linear_cross_entropy(x, head) + terms
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from minillm_core.errors import PlanError
from minillm_core.nn.block import Block, BlockSpec, Nothing, norm_of, normed
from minillm_core.nn.decoding import check_lookbacks
from minillm_core.nn.embedding import Embedding, head_of
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.linear import Linear
from minillm_core.nn.loss import LossSpec, shifted, stacked, target_weights
from minillm_core.nn.module import Module, named_modules, seal
from minillm_core.nn.node import Node, Scope
from minillm_core.nn.residual import Site, SiteSpec

__all__ = ["Decoder", "DecoderSpec", "Loss", "decoder"]


@dataclass(frozen=True)
class DecoderSpec:
    """The whole model, resolved: what :func:`decoder` builds on any framework."""

    geometry: Geometry
    tied: bool
    embed: tuple[Node, ...]
    streams: tuple[Node, ...]  # in an order in which each finds what it reads
    blocks: tuple[BlockSpec, ...]
    taps: tuple[tuple[str, str], ...]  # name that a plugin gave -> site, sorted
    final: SiteSpec | None
    final_norm: Node | Nothing | None
    loss: LossSpec
    linears: tuple[tuple[str, Node], ...] = ()  # leaf -> what replaces its product


class Loss(NamedTuple):
    """What a micro-batch gives; ``objective`` is the only differentiable one."""

    objective: Any  # 0-d float32, scaled
    sums: Any  # float32 (1 + targets present,): nats, main target first, unweighted
    count: Any  # 0-d float32: supervised positions of the main target
    terms: dict[str, Any]  # key -> 0-d float32, unweighted
    statistics: dict[str, Any]  # path.name -> array, without gradient


class Decoder(Module):
    """batch, values -> Loss."""

    def __init__(self, spec: DecoderSpec, *, checkpointing: bool) -> None:
        super().__init__()
        self.geometry = g = spec.geometry
        self.embedding = Embedding(g, tied=spec.tied)
        self.embed = {node.name: node.make(g) for node in spec.embed}
        self.streams = {node.name: node.make(g) for node in spec.streams}
        self.layers = [
            Block(layer_geometry(g, index), block) for index, block in enumerate(spec.blocks)
        ]
        self.site_final = Site(g, spec.final) if spec.final else None
        self.norm = norm_of(g, spec.final_norm)
        self.head = None if spec.tied else head_of(g)
        self.terms_nodes = {
            term.key: term.node.make(g) for term in spec.loss.terms if term.node is not None
        }
        self.loss = spec.loss
        self.checkpointing = checkpointing
        self.tap_aliases = {
            f"layers.{index}.{tap}": tuple(
                name for name, site in spec.taps if site == f"layers.{index}.{tap}"
            )
            for index, block in enumerate(spec.blocks)
            for tap in block.taps
        }

    def forward(self, batch: dict[str, Any], values: dict[str, Any]) -> Loss:
        """The training loss of one micro-batch.

        Args:
            batch: ids, labels (B, T) int32, and the fields that nodes read.
            values: schedule values, 0-d float32, and ``normaliser``: loss scale / supervised tokens
                of the whole step.
        """
        ops = self.ops
        hidden, scope, statistics = self.hidden(batch, values)
        B, T, C = hidden.shape
        targets, weights = [batch["labels"]], [batch.get("weights")]
        for target in self.loss.present(values):
            if target.field is not None:
                targets.append(batch[target.field])
            else:
                targets.append(shifted(ops, batch["labels"], target.offset or 1))
            weights.append(target.weight.of(values))
        total, sums, count = ops.linear_cross_entropy(
            ops.reshape(hidden, (B * T, C)),
            self.head_weight(),
            stacked(ops, targets, B * T),
            target_weights(ops, weights, B * T),
            self.loss.form,
        )
        objective = total * values["normaliser"]
        share = count * values["normaliser"]  # of the step's supervised tokens, times loss scale
        terms = {}
        for term in self.loss.terms:
            if term.node is not None:
                value = scope.apply(self.terms_nodes[term.key], {"x": hidden})
            else:
                value = sum(scope.emitted[name] for name in self.term_sources[term.key])
            value = ops.astype(value, "float32")
            terms[term.key] = ops.stop_gradient(value)
            objective = objective + value * ops.like(term.weight.of(values), value) * share
        return Loss(objective, sums, count, terms, statistics)

    def evaluate(self, batch: dict[str, Any], values: dict[str, Any]) -> tuple[Any, Any]:
        """(nats, predictions) of the main target: what validation reports, both 0-d float32."""
        hidden, _, _ = self.hidden(batch, values)
        B, T, C = hidden.shape
        _, sums, count = self.ops.linear_cross_entropy(
            self.ops.reshape(hidden, (B * T, C)),
            self.head_weight(),
            self.ops.reshape(batch["labels"], (1, B * T)),
            None,
            self.loss.form.evaluated(),
        )
        return sums[0], count

    def logits(
        self,
        batch: dict[str, Any],
        values: dict[str, Any],
        at: Any,
        scope_of: Callable[[dict[str, Any]], Scope] = Scope,
    ) -> Any:
        """float32 (B, V): the logits at column ``at`` (int32, (1,)) of each row.

        ``scope_of`` a ``Past``: the batch's columns follow those that it has seen.
        """
        hidden, _, _ = self.hidden(batch, values, scope_of)
        B, _, C = hidden.shape
        row = self.ops.reshape(self.ops.take(hidden, at, 1), (B, C))
        return self.ops.logits(row, self.head_weight(), self.loss.form.evaluated())

    def hidden(
        self,
        batch: dict[str, Any],
        values: dict[str, Any],
        scope_of: Callable[[dict[str, Any]], Scope] = Scope,
    ) -> tuple[Any, Scope, dict[str, Any]]:
        """(B, T, C) after the last norm, the scope behind the blocks, and the statistics."""
        scope = scope_of({**batch, **values})
        x = self.embedding(batch["ids"])
        for node in self.embed.values():
            x = scope.apply(node, {"x": x})
        scope.reads["x0"] = x
        for name, node in self.streams.items():
            scope.reads[name] = scope.apply(node, {})
        statistics: dict[str, Any] = {}
        for block in self.layers:
            x, *rest = scope.through(block, x, checkpointing=self.checkpointing)
            names = (*block.tap_names, *block.term_names, *block.statistic_names)
            for name, value in zip(names, rest, strict=True):
                if name in block.tap_names:
                    for known_as in (name, *self.tap_aliases[name]):
                        scope.reads[known_as] = value
                elif name in block.term_names:
                    scope.emitted[name] = value
                else:  # last, and here alone: MLX corrupts gradients under an earlier stop
                    statistics[name] = self.ops.stop_gradient(value)
        if self.site_final is not None:
            x = self.site_final(x, None, scope)
        x = normed(self.norm, x, scope)
        for name in self.statistic_names:
            statistics[name] = self.ops.stop_gradient(scope.emitted[name])
        return x, scope, statistics

    def head_weight(self) -> Any:
        """(V, C): the head, or the embedding that it is tied to."""
        return self.embedding.weight if self.head is None else self.head.weight


def decoder(spec: DecoderSpec, *, checkpointing: bool = False) -> Any:
    """The model on the current framework, every module knowing its path and its claims; sealed.

    Args:
        spec: the model.
        checkpointing: recompute each block in the backward pass.

    Raises:
        PlanError: a claim on the product of what is no Linear leaf of this model, or a module
            that promises terms or statistics where nothing would collect them.
    """
    model: Any = Decoder(spec, checkpointing=checkpointing)
    leaves = {path: m for path, m in named_modules(model) if isinstance(m, Linear)}
    for leaf, node in spec.linears:
        if leaf not in leaves:
            raise PlanError(
                f"plugin '{node.owner}' replaces the product of '{leaf}', which is no leaf",
                where=node.slot,
                fix="leaves are " + ", ".join(sorted(leaves)[:4]) + ", ...",
            )
        leaves[leaf].product = node.make(spec.geometry)
    modules = dict(named_modules(model))
    for path, module in modules.items():
        module.path = path
        _check_emits(path, module)
    check_lookbacks(modules)
    for index, block in enumerate(model.layers):
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
    seal(model)
    return model


def _check_emits(path: str, module: Any) -> None:
    """Only what is called as a node has what it emits collected."""
    if not (module.terms or module.statistics):
        return
    if not hasattr(module, "owner") or path.endswith(".product"):
        raise PlanError(
            f"{type(module).__name__} at {path} has terms or statistics, and is no node that a "
            "block or the model calls",
            fix="name them in the node's own class, and return them from its forward",
        )


def emissions(modules: list[Any], kind: str) -> tuple[str, ...]:
    """path.name of every term or statistic that ``modules`` emit, sorted."""
    return tuple(sorted(f"{m.path}.{name}" for m in modules for name in getattr(m, kind)))


def layer_geometry(geometry: Geometry, layer: int) -> Geometry:
    """The same sizes, at a layer."""
    return replace(geometry, layer=layer)
