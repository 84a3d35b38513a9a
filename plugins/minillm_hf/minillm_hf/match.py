"""The one-to-one mapping between parameters of a plan and tensors of a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minillm_core import ConfigError, Plan, PlanError
from minillm_core.commands import few
from minillm_core.directories import Fitted
from minillm_hf.layouts import LAYOUTS, Layout, in_loss_alone, places, products
from minillm_hf.scaling import Scaling, flags, scaling_of

if TYPE_CHECKING:
    from minillm_hf.read import HuggingFaceDirectory

SIZES = ("layers", "dim", "heads", "kv_heads", "head_dim", "hidden", "vocab", "tied", "norm_eps")
"""Settings that must equal the directory's; rope_base may be changed on purpose."""


def export_layout(plan: Plan) -> Layout:
    """Return the layout that a plan's model fits, with every parameter.

    Args:
        plan: a plan whose plugins all support an export.

    Raises:
        PlanError: a plugin declares a layout that the model does not fit.
    """
    if plan.export.layout not in LAYOUTS:
        raise PlanError(
            f"the model has no layout that others know, but {plan.export.layout}",
            where=f"plugins: {_plugins(plan)}",
            fix="leave the layout out: the model is written with its own modeling files",
        )
    layout, found = LAYOUTS[plan.export.layout], places(plan)
    try:
        lack = layout.lacks(plan)
        scaling_of(plan)
    except ValueError as error:
        lack = str(error)
    if lack:
        raise _misdeclared(plan, f"the model is not of the {layout.name} layout: {lack}")
    tensors = layout.tensors(plan.config.model).values()
    known = {tensor.place for tensor in tensors}
    needed = {tensor.place for tensor in tensors if not tensor.ones}
    shapes = {place: plan.parameters[name].shape for place, name in found.items()}
    other = {t.place for t in tensors if shapes.get(t.place, t.shape) != t.shape}
    problems = (
        ("has no place for", found.keys() - known),
        ("needs", needed - found.keys()),
        ("wants another shape of", other),
    )
    for what, wrong in problems:
        if wrong:
            names = sorted(found.get(place, place) for place in wrong)
            raise _misdeclared(plan, f"the {layout.name} layout {what} {few(names)}", names)
    return layout


def exported(plan: Plan, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert a run's arrays to the tensors of a directory, float32, by their names there.

    Products of foldable plugins (LoRA) are merged into the weights.

    Args:
        plan: of the run.
        arrays: every ``model.<parameter>`` and ``state.<name>``.

    Raises:
        PlanError: the plan cannot be exported, or the model has state besides its parameters.
    """
    layout, found = export_layout(plan), places(plan)
    kept = (name for name in sorted(arrays) if name.startswith("state."))
    if states := [name for name in kept if not in_loss_alone(plan, name.removeprefix("state."))]:
        raise _misdeclared(plan, f"the {layout.name} layout has no place for {few(states)}")
    weights = {name: arrays[f"model.{name}"] for name in found.values()}
    for leaf, module in products(plan).items():
        prefix, weight = f"model.{leaf}.product.", f"{leaf}.weight"
        own = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
        weights[weight] = module.folded(weights[weight], own)
    return {
        name: weights[found[tensor.place]]
        if tensor.place in found
        else np.ones(tensor.shape, np.float32)
        for name, tensor in layout.tensors(plan.config.model).items()
    }


def check_fit(plan: Plan, directory: HuggingFaceDirectory) -> None:
    """Check that a plan has a directory's model sizes and plugins, without reading tensors.

    Raises:
        ConfigError: a model setting differs from the directory's.
        PlanError: the plan lacks a plugin; the fix names it with its options.
    """
    model, layout = plan.config.model, directory.layout
    of_ours, of_theirs = (
        one.model_dump() | {"head_dim": one.head_width} for one in (model, directory.model)
    )
    for key in SIZES:
        ours, theirs = of_ours[key], of_theirs[key]
        if ours != theirs:
            raise ConfigError(
                f"model.{key} is {json.dumps(ours)}, and the model to start from has "
                f"{json.dumps(theirs)}",
                where=str(directory.path),
                fix=f"leave model.{key} out, or set it to {json.dumps(theirs)}",
            )
    needed, scaling = directory.plugins, directory.scaling
    if lack := layout.lacks(plan):
        raise PlanError(
            f"the plan is not a {layout.name} model: {lack}",
            where=str(directory.path),
            fix=f"add {flags(needed)}",
        )
    if scaling is not None and _scaling(plan) != scaling:  # scaling may be added on purpose
        raise PlanError(
            f"the directory scales its rotary frequencies ({scaling.rope_type}), and the plan does "
            "not, or otherwise",
            where=f"{directory.path}: {_shown(scaling)}",
            fix=f"add {flags(needed)}",
        )


def fit(plan: Plan, directory: HuggingFaceDirectory) -> Fitted:
    """Match a directory's tensors to the parameters of a plan's model.

    Raises:
        ConfigError: a model setting differs from the directory's.
        PlanError: the plan has no parameter for a tensor, or one of another shape.
    """
    check_fit(plan, directory)
    needed = directory.plugins
    found, taken, arrays = places(plan), {}, directory.arrays()
    for tensor in directory.tensors.values():
        name, array = found.get(tensor.place), arrays[f"model.{tensor.place}"]
        if name is None:
            if tensor.ones and (np.asarray(array) == 1).all():
                continue  # the plan's own norm has no weights
            raise PlanError(
                f"the model has no place for {tensor.place}",
                where=str(directory.path),
                fix=f"leave out what takes it away: {_plugins(plan)}"
                + (f"; the layout needs {flags(needed)}" if needed else ""),
            )
        wanted = plan.parameters[name].shape
        if wanted != array.shape:
            raise PlanError(
                f"{name} is {wanted} in the model, and {array.shape} in the one to start from",
                where=str(directory.path),
                fix=f"leave out what changes it: {_plugins(plan)}",
            )
        taken[f"model.{name}"] = array
    return Fitted(taken, tuple(name for name in plan.parameters if f"model.{name}" not in taken))


def _scaling(plan: Plan) -> Scaling | None:
    try:
        return scaling_of(plan)
    except ValueError:
        return None


def _shown(scaling: Scaling) -> str:
    return ", ".join(f"{key} {value}" for key, value in scaling.table().items())


def _misdeclared(plan: Plan, what: str, names: Sequence[str] = ()) -> PlanError:
    """Return the error for a plugin's ``export=`` of a layout that its model does not fit."""
    owners = {plan.parameters[name].owner for name in names if name in plan.parameters} - {"core"}
    return PlanError(
        what,
        where=f"plugins: {', '.join(sorted(owners)) or _plugins(plan)}",
        fix='a plugin must not say export="..." of a layout that does not fit',
    )


def _plugins(plan: Plan) -> str:
    return ", ".join(plugin.name for plugin in plan.plugins) or "no plugin is active"
