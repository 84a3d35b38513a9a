"""What the tests of this distribution share: a small plan, and steps of its update in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin
from minillm_core.config.load import load
from minillm_core.optim.groups import Group
from minillm_core.optim.update import cycles_of, due_at, initial_state, update
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import NumPyOps

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def planned() -> Callable[..., Plan]:
    """``planned({"muon": Muon()}, "train.lr=1")``: a model of square, wide and tall matrices."""

    def plan(plugins: dict[str, Plugin], *settings: str) -> Plan:
        size = ("model.layers=2", "model.dim=16", "model.hidden=40", "model.vocab=32")
        config = load(
            preset="tiny", assignments=(*size, *settings), default_preset=lambda: ("tiny", "test")
        ).config
        return build_plan(config, [LoadedPlugin.of(name, one) for name, one in plugins.items()])

    return plan


@pytest.fixture(scope="session")
def drawn() -> Callable[[Plan, np.random.Generator], Arrays]:
    """An array for every parameter."""

    def draw(plan: Plan, rng: np.random.Generator) -> Arrays:
        return {name: rng.standard_normal(info.shape) for name, info in plan.parameters.items()}

    return draw


@pytest.fixture(scope="session")
def stepped() -> Callable[..., tuple[Arrays, Any]]:
    """Parameters and state after one update for each of the gradients, from the first on, in float64; values of all, or of each."""

    def run(
        plan: Plan,
        params: Arrays,
        grads: list[Arrays],
        values: dict[str, float] | list[dict[str, float]],
        state: Any = None,
        first: int = 1,
    ) -> Any:
        ops: Any = NumPyOps()
        groups: dict[str, Group] = {str(i): group for i, group in enumerate(plan.groups)}
        state = initial_state(groups, np.zeros) if state is None else state
        for step, grad in enumerate(grads, first):
            now = values[step - first] if isinstance(values, list) else values
            due, count = due_at(cycles_of(plan.groups), step - 1), np.float64(step)
            params, state = update(ops, groups, params, grad, 1.0, state, count, now, due=due)
        return params, state

    return run
