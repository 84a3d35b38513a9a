"""The parameters that follow a rule of this distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Scope = Literal["all", "hidden", "rest"]


def in_scope(scope: Scope) -> Callable[[str, Any], bool]:
    """Return the predicate ``where(name, info)`` of a scope.

    ``hidden`` selects the matrices inside the blocks (attention, MLP, adapters), as Muon does;
    ``rest`` everything else, so that two rules can share a model: ``muon`` with ``lion.scope=rest``.
    """

    def where(name: str, info: Any) -> bool:
        hidden = len(info.shape) == 2 and info.role.split(".")[0] in ("attention", "mlp", "lora")
        return {"all": True, "hidden": hidden, "rest": not hidden}[scope]

    return where
