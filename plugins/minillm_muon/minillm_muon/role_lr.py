"""Learning rates, betas and decay by a parameter's role, as in nanochat and modded-nanogpt.

With Muon, AdamW trains all parameters but the hidden matrices, and no single learning rate suits them: rows of
an embedding are updated rarely and need one 10 to 100 times higher than a head. modded-nanogpt's
record of 2025-02-01 gives the embedding 0.6, the head 0.22 and scalars 0.04, all with betas 0.8
and 0.95; nanochat 0.2, 0.004 and 0.5.

A factor multiplies ``train.lr`` (or the learning rate of the parameter's rule), together
with the factor that a plugin's parameter declares. Every default is 1, which changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from minillm_core import PlanError, Plugin, option

__all__ = ["ROLES", "RoleLR"]

Role = Literal["embedding", "head", "attention", "mlp", "down", "norm", "gate", "scalar"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(ge=0)]

ROLES: dict[Role, tuple[str, ...]] = {
    "embedding": ("embedding.token",),  # plugins' tables have options of their own
    "head": ("head",),
    "attention": ("attention",),
    "mlp": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
    "norm": ("norm",),
    "gate": ("gate",),
    "scalar": ("scalar",),
}
"""Option -> the roles of the parameters that it applies to."""


class RoleLR(Plugin, api=1):
    """Learning rates, betas and weight decay by the role of a parameter."""

    embedding: float = option(
        1.0,
        ge=0,
        search=(1.0, 5.0, 20.0, 75.0, 150.0),
        help="factor on the learning rate of the token embedding",
    )
    head: float = option(
        1.0,
        ge=0,
        search=(0.25, 0.5, 1.0, 2.0),
        help="factor on the learning rate of the untied head",
    )
    attention: float = option(1.0, ge=0, help="factor on the learning rate of q, k, v and o")
    mlp: float = option(1.0, ge=0, help="factor on the learning rate of the MLP's first matrices")
    down: float = option(1.0, ge=0, help="factor on the learning rate of the MLP's last matrix")
    norm: float = option(1.0, ge=0, help="factor on the learning rate of norms' weights")
    gate: float = option(1.0, ge=0, help="factor on the learning rate of plugins' gates")
    scalar: float = option(1.0, ge=0, help="factor on the learning rate of plugins' scalars")
    betas: dict[Role, tuple[Beta, Beta]] = option(
        {},
        help="AdamW's betas by role, such as {embedding = [0.8, 0.95]}; other roles: train.betas",
    )
    decay: dict[Role, Factor] = option(
        {}, help="factors on the weight decay by role, such as {embedding = 0}"
    )

    def optimizer_factory(self, optimizer):
        for option_, roles in ROLES.items():
            factor = getattr(self, option_)
            betas, decay = self.betas.get(option_), self.decay.get(option_)
            if factor == 1.0 and betas is None and decay is None:
                continue
            names = tuple(_named(optimizer.parameters, roles))
            if not names:
                raise PlanError(
                    f"role_lr.{option_}: the model has no parameter of the role {roles[0]}",
                    where="opt.set",
                    fix=f"leave role_lr.{option_} out, or add a plugin that has one",
                )
            for name in names:
                own = optimizer.parameters[name]
                optimizer.set(
                    lambda other, _, name=name: other == name,
                    lr_mul=None if factor == 1.0 else own.lr_mul * factor,
                    wd_mul=None if decay is None else own.wd_mul * decay,
                    betas=betas,
                )


def _named(parameters, roles: tuple[str, ...]) -> Iterator[str]:
    """Select parameters whose role is one of these, or below one."""
    for name, info in parameters.items():
        if any(f"{info.role}.".startswith(f"{role}.") for role in roles):
            yield name
