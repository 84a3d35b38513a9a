"""The eight hooks. A plugin is a class with methods of these names; all but the last two run while planning."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from minillm_core.plugins.builders import (
        AttentionBuilder,
        DataBuilder,
        KernelBuilder,
        LossBuilder,
        ModelBuilder,
        OptimizerBuilder,
    )

__all__ = ["HOOKS", "PROJECT", "Hooks", "hookimpl"]

PROJECT = "minillm"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """What a plugin may implement. Builders are bound to the plugin: every entry knows its owner."""

    @hookspec
    def build_attention(self, attn: AttentionBuilder) -> None:
        """Plan, once a layer: the slots of that layer's attention."""

    @hookspec
    def build_model(self, model: ModelBuilder) -> None:
        """Plan: embedding, streams, residual sites, MLPs, norms, linears, taps, initial values."""

    @hookspec
    def compute_loss(self, loss: LossBuilder) -> None:
        """Plan: the form of the logits, further targets, further terms."""

    @hookspec
    def optimizer_factory(self, optimizer: OptimizerBuilder) -> None:
        """Plan, last: every parameter is known; rules, stages, assignment, multipliers."""

    @hookspec
    def kernel_provider(self, kernels: KernelBuilder) -> None:
        """Plan, then binding: candidates for ops."""

    @hookspec
    def build_data(self, data: DataBuilder) -> None:
        """Plan: source, packer, further fields of the batch."""

    @hookspec
    def on_batch(self, batch: dict[str, Any], phase: str) -> dict[str, Any]:
        """Run, loader thread: a NumPy batch in phase train, eval or decode; returns a batch."""
        raise NotImplementedError

    @hookspec
    def on_event(self, event: Any) -> None:
        """Run: typed events (minillm_core.train.events); an observer changes nothing."""


HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)[1:]
    for name, function in vars(Hooks).items()
    if not name.startswith("_")
}
"""Hook -> the names of its arguments, in order."""
