"""Every parameter of a planned model: who declares it, and from which values it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.init import Init
from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.param import Param
from minillm_core.plan.plan import as_json
from minillm_core.plugins.builders import ParamInfo
from minillm_core.text import nearest

__all__ = ["parameters_of", "started"]


def parameters_of(model: Any) -> dict[str, ParamInfo]:
    """Name -> parameter of an outline, with the initial values that its module gives it."""
    owners = _owners(model)
    return {
        name: ParamInfo(
            name=name,
            shape=param.shape,
            axes=param.axes,
            role=param.role,
            init=as_json(param.init),
            owner=owners.get(module.path, "core"),
            lr_mul=param.lr_mul,
            wd_mul=param.wd_mul,
        )
        for name, module, _, param in declared(model, Param)
    }


def started(
    parameters: Mapping[str, ParamInfo], inits: Mapping[str, tuple[str, Init]]
) -> dict[str, ParamInfo]:
    """The parameters whose initial values plugins claim, with those.

    Args:
        parameters: all of the model.
        inits: parameter -> (owner, initialiser).

    Raises:
        PlanError: a claim on what is no parameter.
    """
    for name, (owner, _) in inits.items():
        if name not in parameters:
            near = nearest(name, parameters)
            raise PlanError(
                f"plugin '{owner}' gives initial values to '{name}', which is no parameter",
                where=f"model.init[{name}]",
                fix=f"did you mean {near}?" if near else "minillm plan --json lists them",
            )
    return {
        name: replace(parameters[name], init=as_json(init)) for name, (_, init) in inits.items()
    }


def _owners(model: Any) -> dict[str, str]:
    """Path -> the plugin whose module it is, or is part of."""
    owners: dict[str, str] = {}
    for path, module in named_modules(model):
        inherited = owners.get(path.rpartition(".")[0])
        for parent in _parents(path):
            inherited = inherited or owners.get(parent)
        owner = getattr(module, "owner", None) or inherited
        if owner:
            owners[path] = owner
    return owners


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
