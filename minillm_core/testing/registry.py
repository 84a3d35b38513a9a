"""All checks, in the order of cost; what a check needs comes before it."""

from __future__ import annotations

from minillm_core.testing import (
    decoding,
    export,
    frameworks,
    hooks,
    hygiene,
    kernels,
    numbers,
    pairs,
    plan,
    repeats,
    state,
    training,
    updates,
)

__all__ = ["CHECKS"]

CHECKS = (
    *hygiene.CHECKS,
    *plan.CHECKS,
    *hooks.CHECKS,
    *kernels.CHECKS,
    *repeats.CHECKS,
    *numbers.CHECKS,
    *training.CHECKS,
    *state.CHECKS,
    *updates.CHECKS,
    *decoding.CHECKS,
    *export.CHECKS,
    *frameworks.CHECKS,
    *pairs.CHECKS,
)
