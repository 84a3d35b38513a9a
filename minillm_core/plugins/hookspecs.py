"""The eight hooks. A plugin is a class with methods of these names; all but the last two run while planning."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.plugins import builders


class Hooks:
    """What a plugin may implement. Builders are bound to the plugin: every entry knows its owner."""

    def build_attention(self, attn: builders.AttentionBuilder) -> None:
        """While planning, once a layer: the slots of that layer's attention."""

    def build_model(self, model: builders.ModelBuilder) -> None:
        """While planning: embedding, streams, residual sites, whole sublayers, norms, initial values."""

    def compute_loss(self, loss: builders.LossBuilder) -> None:
        """While planning: the form of the logits, further targets, further terms."""

    def optimizer_factory(self, optimizer: builders.OptimizerBuilder) -> None:
        """While planning, last: rules, their stages, which parameter follows which, multipliers."""

    def kernel_provider(self, kernels: builders.KernelBuilder) -> None:
        """While planning: candidates for ops, which are chosen from when the plan is bound to a device."""

    def build_data(self, data: builders.DataBuilder) -> None:
        """While planning: the documents, their order and rows, special tokens, further fields, what ``on_batch`` reads."""

    def on_batch(
        self,
        batch: dict[str, Any],
        phase: str,
        vocab: int,
        progress: float,
        specials: dict[str, int],
        pieces: tuple[bytes, ...],
    ) -> dict[str, Any]:
        """While running, in the loader's thread: a NumPy batch in phase train, eval or decode.

        ids are below ``vocab``, which is model.vocab. ``progress`` is the batch's place in the run:
        its step over train.steps, up to 1; in the other phases 1. ``specials``: name -> id of the
        special tokens that plugins asked for, and ``end_of_text``. ``pieces``: the bytes of each id, in
        phase train, none of special and unused ones; empty where the tokenizer is not known.
        """
        raise NotImplementedError

    def on_evaluated(self, evaluated: Any, history: Any, model: Any) -> Any:
        """While running, after an evaluation: figures of one's own, and whether the run ends there."""

    def on_event(self, event: Any) -> None:
        """While running: typed events, for an observer, which changes nothing."""


HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)[1:]
    for name, function in vars(Hooks).items()
    if not name.startswith("_")
}
"""Hook -> the names of its arguments, in order."""
