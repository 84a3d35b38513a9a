"""The infinite schedule: cooldown to a constant learning rate that can be held indefinitely (arXiv:2403.08763).

    warm-up      the run's own, to the peak
    cooldown     from the peak to ``constant`` of it, along half a cosine or an inverse root:
                 1 + (constant - 1) h(y) / h(1),  h(y) = 1 / sqrt(1 + 10 y) - 1,  y from 0 to 1
    constant     held: a branch of the run can continue from there on other text, without another warm-up
    annealing    constant (least / constant)^y in the last part of the run, before evaluation

Fractions are of the run after the warm-up, where the paper counts steps: a run with
``infinite_lr.annealing=0`` never anneals, and a branch ``--branch RUN@STEP`` can anneal. The defaults are the
paper's rates: 0.55 and 0.1 of the peak.
"""

from __future__ import annotations

import math
from typing import Literal

from minillm_core import PlanError, Plugin, option

__all__ = ["InfiniteLR", "phased"]

PARTNERS = {"form": "cooldown", "least": "annealing"}
"""Option -> the phase that it describes, without which it has no effect."""

ALPHA = 10.0
"""Constant of the inverse root: how much of the descent happens at its beginning."""


class InfiniteLR(Plugin, api=1):
    """Rates cool down to a constant, are held there, and are annealed at the end."""

    cooldown: float = option(
        0.6,
        ge=0,
        lt=1,
        help="fraction of the run after warm-up in which the rate falls to constant",
    )
    form: Literal["cosine", "inverse_root"] = option(
        "cosine",
        search=("cosine", "inverse_root"),
        help="shape of this fall: cosine or inverse_root",
    )
    constant: float = option(
        0.55, gt=0, le=1, help="learning rate that is held, as a fraction of the peak"
    )
    annealing: float = option(
        0.15,
        ge=0,
        lt=1,
        help="last fraction of the run after warm-up, in which the rate falls to least",
    )
    least: float = option(
        0.1, gt=0, le=1, help="learning rate at the end, as a fraction of the peak"
    )

    def optimizer_factory(self, optimizer):
        if self.cooldown + self.annealing > 1:
            raise PlanError(
                f"infinite_lr.cooldown={self.cooldown} and infinite_lr.annealing={self.annealing} "
                "are more than the run",
                where="opt.schedule",
                fix="choose fractions whose sum is at most 1",
            )
        if self.annealing and self.least > self.constant:
            raise PlanError(
                f"infinite_lr.least={self.least} is above infinite_lr.constant={self.constant}: "
                "annealing would raise the rate",
                where="opt.schedule",
                fix=f"infinite_lr.least={self.constant} or less, or infinite_lr.annealing=0 without "
                "infinite_lr.least",
            )
        for name, partner in PARTNERS.items():
            value = getattr(self, name)
            if not getattr(self, partner) and value != type(self).model_fields[name].default:
                raise PlanError(
                    f"infinite_lr.{name}={value} has no effect with infinite_lr.{partner}=0",
                    where="opt.schedule",
                    fix=f"set infinite_lr.{partner} above 0, or leave infinite_lr.{name} out",
                )
        optimizer.schedule(
            phased,
            cooldown=self.cooldown,
            form=self.form,
            constant=self.constant,
            annealing=self.annealing,
            least=self.least,
        )


def phased(
    x: float, *, cooldown: float, form: str, constant: float, annealing: float, least: float
) -> float:
    """Return the fraction of the peak at x, the fraction of the run after the warm-up."""
    if x < cooldown:
        return 1.0 + (constant - 1.0) * FORMS[form](x / cooldown)
    if annealing and x > 1.0 - annealing:
        return constant * (least / constant) ** ((x - 1.0 + annealing) / annealing)
    return constant


def _cosine(y: float) -> float:
    return 0.5 * (1.0 - math.cos(math.pi * y))


def _inverse_root(y: float) -> float:
    return ((1.0 + ALPHA * y) ** -0.5 - 1.0) / ((1.0 + ALPHA) ** -0.5 - 1.0)


FORMS = {"cosine": _cosine, "inverse_root": _inverse_root}
"""Maps 0..1 to the completed fraction of the descent."""
