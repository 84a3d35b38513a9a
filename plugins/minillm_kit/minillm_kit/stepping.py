"""Optimizer steps for an author's own tests: a plan's update from gradients supplied by the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core import Plan, Plugin, build_plan, load
from minillm_core.inspection import (
    Group,
    LoadedPlugin,
    cycles_of,
    due_at,
    initial_state,
    read_value,
    update,
)
from minillm_kit.oracle import NumPyOps

__all__ = ["SIZES", "drawn", "plan", "stepped"]

Arrays = dict[str, np.ndarray]
"""Parameter -> its array."""

SIZES = {"model.layers": 2, "model.dim": 16, "model.hidden": 40, "model.vocab": 32}
"""Sizes of the model, with square, wide and tall matrices."""


def plan(plugins: Mapping[str, Plugin], *settings: str) -> Plan:
    """Plan a model of :data:`SIZES` with plugins: name -> instance.

    ::

        stepping.plan({"muon": Muon()}, "train.weight_decay=0")
    """
    given = dict(one.split("=", 1) for one in settings)
    values = {key: read_value(text) for key, text in given.items()}
    config = load(preset="tiny", settings={**SIZES, **values}).config
    return build_plan(config, [LoadedPlugin.of(name, one) for name, one in plugins.items()])


def drawn(plan: Plan, rng: np.random.Generator) -> Arrays:
    """Draw an array from a normal distribution for every parameter."""
    return {name: rng.standard_normal(info.shape) for name, info in plan.parameters.items()}


def stepped(
    plan: Plan,
    params: Arrays,
    grads: Sequence[Arrays],
    values: Mapping[str, float] | Sequence[Mapping[str, float]],
    state: Any = None,
    first: int = 1,
) -> tuple[Arrays, Any]:
    """Apply one update per entry of ``grads`` by the plan's stages, in NumPy float64.

    Args:
        plan: with parameter groups and their rules.
        params: parameters at the start.
        grads: gradients of each update, not clipped.
        values: schedule value -> number, for all updates or per update.
        state: optimizer state returned by previous updates; None: a run's initial state.
        first: number of the first of these updates, counted from 1.

    Returns:
        The parameters and the optimizer state: group -> anchor -> entry -> array.
    """
    ops: Any = NumPyOps()
    groups: dict[str, Group] = {str(i): group for i, group in enumerate(plan.groups)}
    state = initial_state(groups, np.zeros) if state is None else state
    for step, grad in enumerate(grads, first):
        now = values if isinstance(values, Mapping) else values[step - first]
        due, count = due_at(cycles_of(plan.groups), step - 1), np.float64(step)
        params, state = update(ops, groups, params, grad, 1.0, state, count, now, due=due)
    return params, state
