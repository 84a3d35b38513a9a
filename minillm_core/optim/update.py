"""The optimizer update, written once: gradient norm and clipping, then the stages of every parameter group.

Pure: it returns new parameters and new optimizer state, and only a backend writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from minillm_core.errors import PluginCodeError
from minillm_core.ops.arrays import dtype_name, mismatch
from minillm_core.optim.groups import Group
from minillm_core.optim.stage import BEHIND, Stage
from minillm_core.text import few

State = dict[str, dict[str, dict[str, Any]]]
"""group key -> anchor -> entry -> stored array, (N, ...) if the rule stacks; see Stage.state_arrays."""

EPSILON = 1e-6  # as in torch's clip_grad_norm_


def global_norm(ops: Any, grads: Iterable[Any]) -> Any:
    """Compute the norm over all arrays together, 0-d float32; the last axes are reduced first."""
    squares = [ops.sum(ops.square(ops.astype(grad, "float32"))) for grad in grads]
    return ops.sqrt(ops.sum(ops.stack(squares, 0)))


def clip_factor(ops: Any, norm: Any, clip: float) -> Any:
    """Compute the clipping factor, 0-d float32: it scales the gradients to a norm of at most ``clip``."""
    if not clip:
        return ops.ones_like(norm)
    return ops.minimum(clip / (norm + EPSILON), ops.ones_like(norm))


def layer_of(name: str) -> str:
    """Return a parameter's layer, or its own name if it is in none: ``layers.0``, ``head.weight``."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else name


def layer_grad_norms(ops: Any, grads: Mapping[str, Any], factor: Any) -> dict[str, Any]:
    """Compute the norm over all gradients of each layer, times ``factor``: layer -> 0-d float32."""
    layers: dict[str, list[Any]] = {}
    for name, grad in grads.items():
        layers.setdefault(layer_of(name), []).append(grad)
    return {layer: global_norm(ops, those) * factor for layer, those in layers.items()}


def initial_state(groups: Mapping[str, Group], zeros: Callable[..., Any]) -> State:
    """Create the initial optimizer state, all zeros, by ``zeros(shape)`` or ``zeros(shape, dtype)``."""
    return {
        key: {
            anchor: {entry: zeros(*one.zeros_arguments) for entry, one in entries.items()}
            for anchor, entries in group.state_arrays().items()
        }
        for key, group in groups.items()
        if group.state_arrays()
    }


def by_parameter(groups: Mapping[str, Group], state: State) -> dict[str, Any]:
    """Return the optimizer state by parameter: ``anchor.entry.parameter`` -> its slice of the stack."""
    named = {}
    for key, anchors in state.items():
        group = groups[key]
        for anchor, entries in anchors.items():
            for entry, stack in entries.items():
                parts = list(stack) if group.rule.stacked else [stack]
                for member, part in zip(group.members, parts, strict=True):
                    named[f"{anchor}.{entry}.{member.name}"] = part
    return named


def cycles_of(groups: Iterable[Group]) -> tuple[int, ...]:
    """Return the values of ``every`` of all stages, except 1, sorted."""
    stages = (stage for group in groups for _, _, stage in group.rule.stages)
    return tuple(sorted({stage.every for stage in stages} - {1}))


def due_at(cycles: Iterable[int], step: int) -> frozenset[int]:
    """Return the cycles that are due in a step, counted from 0; decided on the host, without a device sync."""
    return frozenset(every for every in cycles if step % every == 0)


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
    due: Set[int] | None = None,
    norms: Mapping[str, Any] | None = None,
    copied: Callable[[Any], Any] = lambda array: array,
) -> tuple[dict[str, Any], State]:
    """Compute one optimizer step.

    Args:
        ops: the backend's array functions.
        groups: key -> group.
        params: name -> float32 master weights; or, of all parameters of a stacked group, key -> (N, *shape).
        grads: gradients of the mean loss, times any scale that ``factor`` removes, by name or key too.
        factor: 0-d float32, multiplies every gradient (clipping, inverse loss scale).
        state: the optimizer state, as :func:`initial_state` makes it.
        updates: 0-d float32: the number of updates, this one included.
        values: schedule value -> 0-d float32.
        witness: called with every stage that ran, at trace time.
        versions: returns how often arrays were written in place, if the framework counts it.
        due: the result of :func:`due_at`; None: every stage is due.
        norms: layer -> 0-d norm of its gradients; needed if ``grads`` is only a part of them.
        copied: returns a copy of an array, if the framework writes results into the arrays given here.

    Returns:
        New parameters, by name or key as in ``params``, and the new state.

    Raises:
        PluginCodeError: a stage returned a wrong result, or wrote in place.
    """
    new_params: dict[str, Any] = {}
    new_state: State = {}
    stages = [stage for group in groups.values() for _, _, stage in group.rule.stages]
    by_layer = any("layer_grad_norm" in stage.supplied for stage in stages)
    if norms is not None:
        norms = {layer: norm * factor for layer, norm in norms.items()}
    else:
        norms = layer_grad_norms(ops, grads, factor) if by_layer else {}
    for key, group in groups.items():
        names = [member.name for member in group.members]
        u = ops.astype(_held(ops, key, group, grads), "float32") * factor
        p = _held(ops, key, group, params)
        given = {**values, "updates": updates, **multipliers(ops, group, values)}
        if by_layer:
            given["layer_grad_norm"] = stack_each(ops, group, [norms[layer_of(n)] for n in names])
        old, axes = state.get(key, {}), int(group.rule.stacked)
        new: dict[str, dict[str, Any]] = {}
        for anchor, owner, stage in group.rule.stages:
            where = f"{group.rule.name}.{anchor}"
            given["due"] = stage.every == 1 or due is None or stage.every in due
            if not given["due"] and "due" not in stage.supplied:
                new |= {anchor: old[anchor]} if anchor in old else {}
                for _ in names:  # a resumed run may look for evidence before the stage is due
                    witness(f"stage:{where}")
                continue
            flat = {entry: flatten(ops, group, one) for entry, one in old.get(anchor, {}).items()}
            held = stage.unpacked(ops, flat, axes)
            inputs = (u, p, *held.values())
            before = versions(inputs)
            made = stage.apply(ops, u, u if anchor in BEHIND else p, held, given)
            _check(made, u, stage, owner, where)
            if versions(inputs) != before:
                did = "changed update, param or state in place in"
                raise _did(stage, owner, did, "return new arrays instead", where)
            u, entries = made
            _check_state(entries, held, stage, owner, where)
            if entries:
                # copy state that aliases another input, such as param: writing that input would change it
                entries = {
                    entry: copied(one) if one is not held[entry] and _among(one, inputs) else one
                    for entry, one in entries.items()
                }
                kept = stage.packed(ops, entries, axes)
                new[anchor] = {entry: unflatten(ops, group, one) for entry, one in kept.items()}
            for _ in names:
                witness(f"stage:{where}")
        if new:
            new_state[key] = new
        if key in params:
            new_params[key] = ops.reshape(u, params[key].shape)
        else:
            new_params.update(zip(names, apart(ops, group, u), strict=True))
    return new_params, new_state


def joined(ops: Any, group: Group, arrays: list[Any]) -> Any:
    """Stack arrays (*shape) to (N, *shape); for a rule that does not stack return the single array."""
    return ops.stack(arrays, 0) if group.rule.stacked else arrays[0]


def apart(ops: Any, group: Group, stack: Any) -> list[Any]:
    """Invert :func:`joined`."""
    if not group.rule.stacked:
        return [stack]
    rows = ops.split(stack, len(group.members), 0)
    return [ops.reshape(row, group.members[0].shape) for row in rows]


def _held(ops: Any, key: str, group: Group, arrays: Mapping[str, Any]) -> Any:
    """Return a group's arrays as its stages see them: a member (R, C) that is split, as blocks (R / blocks, C)."""
    whole = key in arrays
    held = arrays[key] if whole else joined(ops, group, [arrays[m.name] for m in group.members])
    return ops.reshape(held, (-1, *group.shape)) if group.blocks > 1 else held


def flatten(ops: Any, group: Group, kept: Any) -> Any:
    """Reshape the stored state of members in blocks, (N, blocks, ...), to a stack (N * blocks, ...)."""
    return ops.reshape(kept, (-1, *kept.shape[2:])) if group.blocks > 1 else kept


def unflatten(ops: Any, group: Group, stack: Any) -> Any:
    """Invert :func:`flatten`."""
    shape = (-1, group.blocks, *stack.shape[1:])
    return ops.reshape(stack, shape) if group.blocks > 1 else stack


def multipliers(ops: Any, group: Group, values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute lr_mul and wd_mul: a number or 0-d if all members agree, else float32 (N, 1, ...)."""
    given = {}
    for field in ("lr_mul", "wd_mul"):
        factors = [getattr(member, field) for member in group.members]
        if len(set(factors)) == 1:
            given[field] = multiplier(factors[0], values)
        elif any(isinstance(factor, str) for factor in factors):
            scalars = [ops.scalar(multiplier(factor, values)) for factor in factors]
            given[field] = stack_each(ops, group, scalars)
        else:
            numbers = [factor for factor in factors for _ in range(group.blocks)]
            given[field] = ops.constant(numbers, (len(numbers),) + (1,) * len(group.shape))
    return given


def stack_each(ops: Any, group: Group, scalars: list[Any]) -> Any:
    """Stack one 0-d array per member to (N, 1, ...), repeated for its blocks; return an unstacked one as is."""
    if not group.rule.stacked:
        return scalars[0]
    repeated = [scalar for scalar in scalars for _ in range(group.blocks)]
    return ops.reshape(ops.stack(repeated, 0), (-1,) + (1,) * len(group.shape))


def multiplier(factor: float | str, values: Mapping[str, Any]) -> Any:
    """Return a factor: the constant, or the schedule value of that name."""
    return values[factor] if isinstance(factor, str) else factor


def _check(made: Any, u: Any, stage: Stage, owner: str, where: str) -> None:
    """Check that a stage returned (update, state): an array shaped like its input, and a dict."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise _did(stage, owner, "returned no (update, state) from", "return update, state", where)
    if got := mismatch(made[0], u):
        fix = f"compute the update with ops and keep its shape, {tuple(u.shape)}"
        raise _did(stage, owner, f"returned an update of {got} from", fix, where)
    if made[0].dtype != u.dtype:
        got, kept = dtype_name(made[0]), dtype_name(u)
        fix = f"updates and parameters are {kept}: ops.astype(update, {kept!r})"
        raise _did(stage, owner, f"returned an update of {got} from", fix, where)


def _among(array: Any, others: Iterable[Any]) -> bool:
    return any(array is other for other in others)


def _check_state(
    made: Mapping[str, Any], held: Mapping[str, Any], stage: Stage, owner: str, where: str
) -> None:
    """Check that the returned state is what the stage declares: entries, shapes and dtypes.

    torch would silently cast another dtype, and MLX would keep that dtype until the first checkpoint
    cannot be written.
    """
    if made.keys() != held.keys():
        names = sorted({*made} ^ {*held})
        did = f"returned the state {sorted(made)} instead of {sorted(held)} from"
        fix = f"return the entries that state= declares: {few(names)}"
        if more := sorted({*made} - {*held}):
            fix = f'declare state={{"{more[0]}": ...}}, or return the state unchanged'
        raise _did(stage, owner, did, fix, where)
    for name, old in held.items():
        if got := mismatch(made[name], old):
            fix = f"state keeps the shape that was declared, here {tuple(old.shape)}"
        elif made[name].dtype != old.dtype:
            got, kept = dtype_name(made[name]), dtype_name(old)
            fix = f"state is kept in {kept}: ops.astype({name}, {kept!r})"
        else:
            continue
        did = f"returned state '{name}' of {got} from"
        raise _did(stage, owner, did, fix, f"{where}, state '{name}'")


def _did(stage: Stage, owner: str, did: str, fix: str, where: str | None = None) -> PluginCodeError:
    function = stage.reference.rpartition(":")[2]
    return PluginCodeError(owner, function, did=did, where=where, fix=fix)
