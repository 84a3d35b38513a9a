"""Power cooldown: a constant learning rate, then a power of the remaining run (modded-nanogpt's PowerCool).

    factor(x) = min(1, ((end - x) / cooldown)^power)        x: fraction of the run after the warm-up, 0 to 1

min(lr, c (t_end - t)^1.2) of the optimization track's results since 2026-05-09, with c such that the fall starts
``cooldown`` before ``end``. Power 1 and end 1 equal train.schedule=wsd with that train.cooldown; a power above 1
falls steeply at first, and approaches 0 slowly. With an end above 1 the run stops before reaching 0, as theirs do,
and with one below 1 its last steps have learning rate 0. A ``cooldown`` longer than ``end`` is refused: the fall would
start within the warm-up, and the peak never be reached.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option

__all__ = ["PowerCooldown", "falling"]


class PowerCooldown(Plugin, api=1):
    """Rates that stay constant, then fall as a power of the remaining fraction of the run."""

    power: float = option(1.2, gt=0, help="exponent of the cooldown; 1: linear, as wsd")
    cooldown: float = option(
        0.8,
        gt=0,
        le=1,
        search=(0.4, 0.6, 0.8),
        help="fraction of the run after warm-up over which rates fall",
    )
    end: float = option(
        1.0,
        gt=0,
        le=2,
        help="point where rates would reach 0, as a fraction of the run after warm-up",
    )

    def optimizer_factory(self, optimizer):
        if self.cooldown > self.end:
            raise PlanError(
                f"power_cooldown.cooldown={self.cooldown} is longer than power_cooldown.end={self.end}: "
                "rates would never reach their peak",
                where="opt.schedule",
                fix=f"power_cooldown.cooldown={self.end} or less, or power_cooldown.end={self.cooldown} or more",
            )
        optimizer.schedule(falling, power=self.power, cooldown=self.cooldown, end=self.end)


def falling(x: float, *, power: float, cooldown: float, end: float) -> float:
    """Return the fraction of the peak at x, the fraction of the run after the warm-up."""
    return min(1.0, max(0.0, end - x) / cooldown) ** power
