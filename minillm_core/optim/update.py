"""The update, written once: a global phase (unscale, norm, clip), then every group's stages.

Pure: new parameters and new state come back, and only a backend writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minillm_core.errors import PluginCodeError
from minillm_core.optim.groups import Group
from minillm_core.optim.stage import Stage

__all__ = ["State", "clip_factor", "global_norm", "initial_state", "update"]

State = dict[str, dict[str, dict[str, Any]]]
"""group key -> anchor -> entry -> float32, (N, ...) where the rule stacks."""

EPSILON = 1e-6  # torch's, in clip_grad_norm_


def global_norm(ops: Any, grads: Iterable[Any]) -> Any:
    """0-d float32: sqrt of the sum of squares over all arrays; last axes are reduced first."""
    squares = [ops.sum(ops.square(ops.astype(grad, "float32"))) for grad in grads]
    return ops.sqrt(ops.sum(ops.stack(squares, 0)))


def clip_factor(ops: Any, norm: Any, clip: float) -> Any:
    """0-d float32: what gradients are multiplied by so that their norm is at most ``clip``."""
    if not clip:
        return ops.ones_like(norm)
    return ops.minimum(clip / (norm + EPSILON), ops.ones_like(norm))


def initial_state(groups: Mapping[str, Group], zeros: Callable[[tuple[int, ...]], Any]) -> State:
    """State of a run's start: zeros everywhere."""
    return {
        key: {
            anchor: {entry: zeros(shape) for entry, shape in entries.items()}
            for anchor, entries in group.state_shapes().items()
        }
        for key, group in groups.items()
        if group.state_shapes()
    }


def update(
    ops: Any,
    groups: Mapping[str, Group],
    params: Mapping[str, Any],
    grads: Mapping[str, Any],
    factor: Any,
    state: State,
    updates: Any,
    values: Mapping[str, Any],
    witness: Callable[[str], None] = lambda key: None,
    versions: Callable[[Iterable[Any]], tuple[int, ...]] = lambda arrays: (),
) -> tuple[dict[str, Any], State]:
    """One optimizer step.

    Args:
        ops: the backend's array functions.
        groups: key -> group.
        params: name -> float32 master weights.
        grads: name -> gradient of the mean loss, times anything that ``factor`` undoes.
        factor: 0-d float32, multiplies every gradient (clipping, loss scale).
        state: as of :func:`initial_state`.
        updates: 0-d float32: how many updates there were, this one included.
        values: schedule value -> 0-d float32.
        witness: told of every stage that ran, at trace time.
        versions: how often arrays were written in place, where that can be told.

    Raises:
        PluginCodeError: a stage gave something else than it should, or wrote in place.
    """
    new_params: dict[str, Any] = {}
    new_state: State = {}
    for key, group in groups.items():
        names = [member.name for member in group.members]
        u = joined(ops, group, [ops.astype(grads[name], "float32") for name in names]) * factor
        p = joined(ops, group, [params[name] for name in names])
        given = {**values, "updates": updates, **multipliers(ops, group)}
        old = state.get(key, {})
        new: dict[str, dict[str, Any]] = {}
        for anchor, owner, stage in group.rule.stages:
            held = old.get(anchor, {})
            before = versions((p, *held.values()))
            made = stage.apply(ops, u, p, held, given)
            _check(made, u, stage, owner, f"{group.rule.name}.{anchor}")
            if versions((p, *held.values())) != before:
                raise _did(
                    stage, owner, "changed param or state in place in", "return new arrays instead"
                )
            u, entries = made
            if entries:
                new[anchor] = entries
            for _ in names:
                witness(f"stage:{group.rule.name}.{anchor}")
        if new:
            new_state[key] = new
        new_params.update(zip(names, apart(ops, group, u), strict=True))
    return new_params, new_state


def joined(ops: Any, group: Group, arrays: list[Any]) -> Any:
    """(*shape) each -> (N, *shape); the one array itself where the rule does not stack."""
    return ops.stack(arrays, 0) if group.rule.stacked else arrays[0]


def apart(ops: Any, group: Group, stack: Any) -> list[Any]:
    """The inverse of :func:`joined`."""
    if not group.rule.stacked:
        return [stack]
    rows = ops.split(stack, len(group.members), 0)
    return [ops.reshape(row, group.shape) for row in rows]


def multipliers(ops: Any, group: Group) -> dict[str, Any]:
    """lr_mul and wd_mul: a number where all members agree, else float32 (N, 1, ...)."""
    given = {}
    for field in ("lr_mul", "wd_mul"):
        numbers = [getattr(member, field) for member in group.members]
        if len(set(numbers)) == 1:
            given[field] = numbers[0]
        else:
            given[field] = ops.constant(numbers, (len(numbers),) + (1,) * len(group.shape))
    return given


def _check(made: Any, u: Any, stage: Stage, owner: str, where: str) -> None:
    """A stage gives (update, state): an array like the update that it was given, and a dict."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise _did(stage, owner, "returned no (update, state) from", "return update, state", where)
    shape = getattr(made[0], "shape", None)
    if shape is None or tuple(shape) != tuple(u.shape):
        got = type(made[0]).__name__ if shape is None else f"shape {tuple(shape)}"
        fix = f"an update has the shape that it came with, here {tuple(u.shape)}"
        raise _did(stage, owner, f"returned an update of {got} from", fix, where)


def _did(stage: Stage, owner: str, did: str, fix: str, where: str | None = None) -> PluginCodeError:
    function = stage.reference.rpartition(":")[2]
    return PluginCodeError(owner, function, did=did, where=where, fix=fix)
