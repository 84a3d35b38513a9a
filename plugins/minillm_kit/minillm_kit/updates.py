"""The update: a backend's optimizer must match the same stages in NumPy float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minillm_core import Plan
from minillm_core.inspection import (
    Group,
    cycles_of,
    due_at,
    joined,
    update,
    views_of,
)
from minillm_kit.check import Failed, NotApplicable
from minillm_kit.numbers import on_host
from minillm_kit.oracle import NumPyFramework, NumPyOps
from minillm_kit.subject import Subject

Arrays = Mapping[str, np.ndarray]

BEFORE = 2
"""Steps before the checked one, so that the optimizer state is not 0."""

BOUND = 1e-3
"""Tolerance of a change against NumPy, relative to its norm: orthogonalisation amplifies rounding."""


def updates(subject: Subject) -> str:
    """Check one update of parameters, state and views against the plan's stages, from known gradients."""
    plan, found = subject.plan(), []
    mine = [
        f"{rule.name}.{anchor}"
        for rule in plan.rules.values()
        for anchor, owner, _ in rule.stages
        if owner == subject.name
    ]
    views = sum(view.owner == subject.name for view in plan.views.values())
    mine += [f"{views} views"] if views else []
    slots = {(one.owner, one.slot): one.what for one in plan.placements}
    if (split := slots.get((subject.name, "opt.split"))) is not None:
        mine.append(f"{split} in blocks of rows")
    if not mine:
        raise NotApplicable(
            "it brings no stage of an optimizer, no blocks and no view of parameters"
        )
    batches = subject.batches(plan, BEFORE + 1)
    looked_at = (0, BEFORE) if cycles_of(plan.groups) else (BEFORE,)  # with the stage due, and not
    for backend in subject.backends:
        run, worst = subject.trainer(plan, backend), 0.0
        for step, batch in enumerate(batches):
            if step not in looked_at:
                subject.train(run, plan, [batch], first=step)
                continue
            start = run.arrays()
            _, grads, _ = subject.gradients(plan, backend, batch, weights=start)
            subject.train(run, plan, [batch], first=step)
            worst = max(worst, _compare(plan, start, run.arrays(), grads, backend, step))
        found.append(f"{backend} {worst:.0e}")
    return f"{', '.join(mine)}: changes {', '.join(found)} of their norm from NumPy's"


def _compare(
    plan: Plan, start: Arrays, end: Arrays, grads: Arrays, backend: str, step: int
) -> float:
    """Return the largest difference of a change in a step (from 0), relative to its norm.

    Raises:
        Failed: it exceeds the tolerance.
    """
    exact = {name: on_host(array) for name, array in start.items()}
    expected, worst = _updated(plan, exact, grads, step), 0.0
    for name, value in sorted(expected.items()):
        change = value - exact[name]
        error = float(np.linalg.norm(on_host(end[name]) - value))
        rounding = _rounding(end[name], value)
        size = float(np.linalg.norm(change))
        worst = max(worst, max(error - rounding, 0.0) / (size or 1.0))
        if not error <= BOUND * size + rounding:
            raise Failed(
                f"{backend}: the update changes {name} by {_length(on_host(end[name]) - exact[name])}, "
                f"in NumPy by {_length(change)}: {error / (size or 1.0):.1e} apart (bound "
                f"{BOUND:.0e})",
                cause="a stage behaves otherwise on this backend: a dtype, an axis, a branch",
            )
    return worst


def _rounding(written: np.ndarray, value: np.ndarray) -> float:
    """Return the allowed difference of an array from ``value``, by its storage dtype."""
    if written.dtype == np.int8:  # one code in a thousand, plus one, may round the other way
        return float(np.sqrt(1 + written.size / 1000))
    return (2.0**-8 if written.dtype == np.int16 else 1e-7) * float(np.linalg.norm(value))


def _updated(plan: Plan, start: Arrays, grads: Arrays, step: int) -> dict[str, np.ndarray]:
    """Compute parameters, state and views after one update, by checkpoint name."""
    ops: Any = NumPyOps()
    framework = NumPyFramework(ops)
    groups = {str(index): group for index, group in enumerate(plan.groups)}
    params = {name: start[f"model.{name}"] for name in plan.parameters}
    values = plan.values((step + 1) / (plan.config.train.steps or 1))
    count, due = start["optimizer.updates"] + 1, due_at(cycles_of(plan.groups), step)
    state = {key: _state(ops, group, start) for key, group in groups.items()}
    versions = framework.versions  # MLX has none of its own: a write in place is found here
    new, states = update(
        ops, groups, params, grads, 1.0, state, count, values, versions=versions, due=due
    )
    found = {f"model.{name}": np.asarray(value) for name, value in new.items()}
    for key, anchors in states.items():
        for anchor, entries in anchors.items():
            for entry, stack in entries.items():
                names = [member.name for member in groups[key].members]
                parts = stack if groups[key].rule.stacked else [stack]
                for name, value in zip(names, parts, strict=True):
                    found[f"optimizer.{anchor}.{entry}.{name}"] = np.asarray(value)
    views = views_of(framework, groups, new, states)
    return found | {f"view.{name}": np.asarray(view) for name, view in views}


def _state(ops: Any, group: Group, start: Arrays) -> dict[str, dict[str, Any]]:
    """Return the state of the group's stages: anchor -> entry -> stacked array."""
    return {
        anchor: {
            entry: joined(
                ops, group, [start[f"optimizer.{anchor}.{entry}.{m.name}"] for m in group.members]
            )
            for entry in entries
        }
        for anchor, entries in group.state_arrays().items()
    }


def _length(change: np.ndarray) -> str:
    return f"{float(np.linalg.norm(change)):.3e}"
