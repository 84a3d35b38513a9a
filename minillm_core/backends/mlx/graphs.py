"""A step's parts on MLX: pure functions of masters, copies and state, compiled whole.

With one micro-batch a step is one graph; with more, one graph a micro-batch adds up gradients,
and one updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from minillm_core.backends.figures import TERM
from minillm_core.backends.mlx import scaler
from minillm_core.backends.mlx.module import MLXFramework
from minillm_core.backends.mlx.states import Statistics
from minillm_core.backends.mlx.weights import Weights
from minillm_core.optim.groups import Group
from minillm_core.optim.update import clip_factor, global_norm, update
from minillm_core.plan import Plan

__all__ = ["Arrays", "Figures", "Graphs"]

Arrays = dict[str, mx.array]
Figures = dict[str, mx.array]


class Graphs:
    """The parts by name, each traced once for every combination of staged values.

    ``whole(masters, state, batch, given) -> masters, state, figures``
    ``first(copies, state, batch, given) -> sums``: gradients, figures, statistics
    ``adds(copies, state, batch, given, sums) -> sums``
    ``update(masters, state, sums, given, mean) -> masters, state, figures``; mean is 1 / batches

    Args:
        plan: what to train.
        model: materialised.
        framework: what the model stands on.
        weights: where parameters live.
        statistics: how State is written.
        groups: key -> group of the optimizer.
        compiled: whether the parts are.
    """

    def __init__(
        self,
        plan: Plan,
        model: Any,
        framework: MLXFramework,
        weights: Weights,
        statistics: Statistics,
        groups: Mapping[str, Group],
        *,
        compiled: bool,
    ) -> None:
        self.plan, self.model, self.framework = plan, model, framework
        self.weights, self.statistics, self.groups = weights, statistics, groups
        self.compiled = compiled
        self.made: dict[Any, Callable[..., Any]] = {}
        self.traces = 0

    def part(self, kind: str, staged: Mapping[str, int]) -> Callable[..., Any]:
        """A part with these staged values baked in."""
        key = (kind, *staged.values())
        if key not in self.made:
            parts = {
                "whole": self._whole,
                "first": self._first,
                "adds": self._adds,
                "update": self._update,
            }
            part = parts[kind]

            def traced(*arguments: Any) -> Any:
                self.traces += 1
                return part(staged, *arguments)

            drawn = mx.random.state
            self.made[key] = (
                mx.compile(traced, inputs=drawn, outputs=drawn) if self.compiled else traced
            )
        return self.made[key]

    def _whole(
        self,
        staged: Mapping[str, int],
        masters: Arrays,
        state: dict[str, Any],
        batch: Arrays,
        given: Arrays,
    ) -> Any:
        # Casting here, and not at the end of the update, was 3 % faster on an H100.
        sums = self._first(staged, self.weights.copies(masters), state, batch, given)
        return self._update(staged, masters, state, sums, given, mx.array(1.0))

    def _first(
        self,
        staged: Mapping[str, int],
        copies: Arrays,
        state: dict[str, Any],
        batch: Arrays,
        given: Arrays,
    ) -> dict[str, Any]:
        """Gradients, figures and statistics of one micro-batch."""
        normaliser = given["normaliser"]
        scale = state["scaler"].get("scale")
        values: dict[str, Any] = {**given, **staged}
        if scale is not None:
            values["normaliser"] = normaliser * scale
        self.statistics.place(state["states"])

        def objective(copies: Arrays) -> Any:
            self.weights.place(copies)
            loss = self.model(batch, values)
            return loss.objective, loss.sums, loss.count, loss.terms, loss.statistics

        (total, sums, count, terms, statistics), grads = mx.value_and_grad(objective)(copies)
        figures = {"loss": sums[0] * normaliser, "objective": total}
        for index, target in enumerate(self.plan.spec.loss.present(staged)):
            figures[TERM + target.key] = sums[index + 1] * normaliser
        for key, value in terms.items():
            figures[TERM + key] = value * count * normaliser
        grads = {key: grad.astype(mx.float32) for key, grad in grads.items()}
        return {"grads": grads, "figures": figures, "statistics": statistics}

    def _adds(
        self,
        staged: Mapping[str, int],
        copies: Arrays,
        state: dict[str, Any],
        batch: Arrays,
        given: Arrays,
        sums: dict[str, Any],
    ) -> dict[str, Any]:
        """The same, added to what is there."""
        fresh = self._first(staged, copies, state, batch, given)
        merged = self.statistics.merged(sums["statistics"], fresh["statistics"])
        return {
            "grads": {k: sums["grads"][k] + g for k, g in fresh["grads"].items()},
            "figures": {k: sums["figures"][k] + f for k, f in fresh["figures"].items()},
            "statistics": merged,
        }

    def _update(
        self,
        staged: Mapping[str, int],
        masters: Arrays,
        state: dict[str, Any],
        sums: dict[str, Any],
        given: Arrays,
        mean: mx.array,
    ) -> tuple[Arrays, dict[str, Any], Figures]:
        ops = self.framework.ops
        grads = self.weights.split(sums["grads"])
        norm = global_norm(ops, grads.values())
        unscale = 1.0 / state["scaler"]["scale"] if state["scaler"] else None
        norm = norm if unscale is None else norm * unscale
        factor = clip_factor(ops, norm, self.plan.config.train.clip)
        factor = factor if unscale is None else factor * unscale
        figures = {"grad_norm": norm, **sums["figures"]}
        found = 1.0 - mx.isfinite(mx.stack(list(figures.values()))).all().astype(mx.float32)
        updates = state["updates"] + 1
        new_masters, new_optimizer = update(
            ops,
            self.groups,
            masters,
            grads,
            factor,
            state["optimizer"],
            updates,
            given,
            self.framework.witness,
        )
        new_state = {
            "optimizer": new_optimizer,
            "states": self.statistics.next(state["states"], sums["statistics"], mean),
            "updates": updates,
        }
        new_state["scaler"] = {}
        if state["scaler"]:
            figures["scale"] = state["scaler"]["scale"]
            new_state["scaler"] = scaler.judge(state["scaler"], found)
        new_masters, new_state = _ordered(masters, new_masters), _ordered(state, new_state)
        return new_masters, new_state, {**figures, "skipped": found}


def _ordered(old: Any, new: Any) -> Any:
    """``new`` with its keys in the order of ``old``: another order is traced again."""
    if isinstance(old, dict):
        return {key: _ordered(value, new[key]) for key, value in old.items()}
    return new
