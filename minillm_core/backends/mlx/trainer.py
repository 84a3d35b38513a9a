"""A step on MLX: pure functions of masters, copies and state, compiled whole.

With one micro-batch a step is one graph; with more, one graph a micro-batch adds up gradients,
and one updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core.backends.base import Batch, Binding, Snapshot, StepResult, Trainer
from minillm_core.backends.figures import TERM, step_result
from minillm_core.backends.mlx import random, saving, scaler
from minillm_core.backends.mlx.inference import MLXModel
from minillm_core.backends.mlx.module import MLXFramework
from minillm_core.optim.update import clip_factor, global_norm, initial_state, update
from minillm_core.plan import Plan
from minillm_core.plan.stages import stages_of

__all__ = ["MLXTrainer"]

Arrays = dict[str, mx.array]
Figures = dict[str, mx.array]


class MLXTrainer(MLXModel, Trainer):
    """A model and its optimizer.

    Args:
        plan: what to train.
        binding: how; recorded in run.json.
        model: materialised and filled, float32.
        framework: what the model stands on.
        join: multiply leaves that read the same input as one.
    """

    def __init__(
        self, plan: Plan, binding: Binding, model: Any, framework: MLXFramework, *, join: bool
    ) -> None:
        super().__init__(plan, binding, model, framework, join=join)
        self.groups = {str(index): group for index, group in enumerate(plan.groups)}
        self.state = {
            "optimizer": initial_state(self.groups, mx.zeros),
            **self.state,
            "scaler": scaler.start() if binding.dtype == "float16" else {},
            "updates": mx.array(0.0),
        }
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.traces = 0
        mx.eval(self.masters, self.state)

    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Figures | None:
        """One optimizer step, queued."""
        staged = {name: int(values[name]) for name in self.staged}
        given = {n: mx.array(float(v)) for n, v in values.items() if n not in staged}
        given["normaliser"] = mx.array(1.0 / supervised)
        batches = [self.moved(host) for host in micro]
        if self.binding.compile and self.staged and not self.graphs:
            with random.kept():
                self._warm_up(batches, given)
        if len(batches) == 1:
            whole = self._graph("whole", staged)
            stepped = whole(self.masters, self.state, batches[0], given)
        else:
            drawn = random.key()
            stepped = self._accumulated(batches, given, staged, cancelled)
            if stepped is None:
                random.restore(drawn)
                return None
        self.masters, self.state, figures = stepped
        mx.async_eval(self.masters, self.state, figures, random.key())
        return figures

    def _warm_up(self, batches: Sequence[Arrays], given: Arrays) -> None:
        """Trace and compile every stage's step, and keep nothing of what it gives."""
        for stage in stages_of(self.plan):
            if len(batches) == 1:
                whole = self._graph("whole", stage)
                mx.eval(whole(self.masters, self.state, batches[0], given))
            else:
                mx.eval(self._accumulated(batches[:2], given, stage))

    def _accumulated(
        self,
        batches: Sequence[Arrays],
        given: Arrays,
        staged: Mapping[str, int],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Arrays, dict[str, Any], Figures] | None:
        copies = self.weights.copies(self.masters)  # once a step, for all micro-batches
        adds, sums = self._graph("adds", staged), None
        for batch in batches:
            if sums is None:
                sums = self._graph("first", staged)(copies, self.state, batch, given)
            elif cancelled():
                return None
            else:
                sums = adds(copies, self.state, batch, given, sums)
            mx.async_eval(sums)  # a graph that spans micro-batches would hold all activations
        mean = mx.array(1.0 / len(batches))
        update = self._graph("update", {})
        return update(self.masters, self.state, sums, given, mean)

    def _graph(self, kind: str, staged: Mapping[str, int]) -> Callable[..., Any]:
        """A step's part with these staged values baked in."""
        key = (kind, *staged.values())
        if key not in self.graphs:
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
            self.graphs[key] = (
                mx.compile(traced, inputs=drawn, outputs=drawn) if self.binding.compile else traced
            )
        return self.graphs[key]

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
        for index, target in enumerate(self.plan.spec.loss.targets):
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
        new_masters = _unless(found, masters, new_masters)
        new_state = _unless(found, {key: state[key] for key in new_state}, new_state)
        new_state["scaler"] = {}
        if state["scaler"]:
            figures["scale"] = state["scaler"]["scale"]
            new_state["scaler"] = scaler.judge(state["scaler"], found)
        return new_masters, _ordered(state, new_state), {**figures, "skipped": found}

    def read(self, handle: Figures) -> StepResult:
        """Wait for a step's figures."""
        mx.eval(handle)
        figures: dict[str, Any] = {name: value.item() for name, value in handle.items()}
        return step_result(figures)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Nats and predictions of the main target; training does not notice."""
        with random.kept():
            return super().evaluate(batches)

    def last_logits(self, batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        """float32 (V,) after the last column of one row; training does not notice."""
        with random.kept():
            return super().last_logits(batch, scope_of)

    def snapshot(self) -> Snapshot:
        """Everything to save."""
        masters, state, key = saving.copies((self.masters, self.state, random.key()))
        return Snapshot(
            lambda: saving.arrays(masters, state, self.groups) | {random.NAME: np.array(key)}
        )

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of :meth:`arrays`."""
        self.masters = saving.masters(arrays, self.masters)
        self.state = saving.state(arrays, self.state, self.groups)
        mx.eval(self.masters, self.state)
        random.load(arrays)

    def witnesses(self) -> Mapping[str, int]:
        """What took part so far."""
        return dict(self.framework.seen)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        mx.synchronize()

    def peak_bytes(self) -> int | None:
        """Largest memory that MLX held."""
        return mx.get_peak_memory()


def _unless(found: mx.array, old: Any, new: Any) -> Any:
    """The old tree where ``found``, else the new one; keys as in the old one."""
    if isinstance(old, dict):
        return {key: _unless(found, value, new[key]) for key, value in old.items()}
    return mx.where(found > 0, old, new)


def _ordered(old: Any, new: Any) -> Any:
    """``new`` with its keys in the order of ``old``: another order is traced again."""
    if isinstance(old, dict):
        return {key: _ordered(value, new[key]) for key, value in old.items()}
    return new
