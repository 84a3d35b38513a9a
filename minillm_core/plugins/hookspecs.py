"""The hooks: a plugin is a class with methods of these names. Only the ``on_`` hooks run after planning."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.plugins import builders


class Hooks:
    """The hooks that a plugin may implement. Builders are bound to the plugin: each entry records its owner."""

    def build_attention(self, attn: builders.AttentionBuilder) -> None:
        """While planning, once per layer: the slots of that layer's attention."""

    def build_model(self, model: builders.ModelBuilder) -> None:
        """While planning: embedding, streams, residual sites, whole sublayers, norms, initial values."""

    def compute_loss(self, loss: builders.LossBuilder) -> None:
        """While planning: the form of the logits, further targets, further terms."""

    def optimizer_factory(self, optimizer: builders.OptimizerBuilder) -> None:
        """While planning, after the model is resolved: update rules, their stages, parameter groups, multipliers."""

    def kernel_provider(self, kernels: builders.KernelBuilder) -> None:
        """While planning: candidate kernels for ops; one is chosen when the plan is bound to a device."""

    def build_data(self, data: builders.DataBuilder) -> None:
        """While planning: the documents, their order and rows, special tokens, the fields of ``on_batch``."""

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

        ids are below ``vocab``, which is model.vocab. ``progress`` is the step divided by train.steps, up
        to 1; in the other phases it is 1. ``specials``: name -> id of the special tokens that plugins
        declare, and ``end_of_text``. ``pieces``: the bytes of each id, in phase train only; empty bytes for
        special and unused ids, and an empty tuple if the tokenizer is not known.
        """
        raise NotImplementedError

    def on_evaluated(self, evaluated: Any, history: Any, model: Any) -> Any:
        """While running, after an evaluation: returns the plugin's own metrics, and whether the run ends."""

    def on_event(self, event: Any) -> None:
        """While running: typed events, for observers such as loggers, which change nothing."""


HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)[1:]
    for name, function in vars(Hooks).items()
    if not name.startswith("_")
}
"""Hook -> the names of its arguments, in order."""
