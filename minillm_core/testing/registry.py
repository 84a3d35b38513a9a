"""All checks, in the order of cost; what a check needs comes before it."""

from __future__ import annotations

from minillm_core.testing import (
    decoding,
    export,
    frameworks,
    hygiene,
    numbers,
    pairs,
    plan,
    state,
    training,
)

__all__ = ["CHECKS"]

CHECKS = (
    *hygiene.CHECKS,
    *plan.CHECKS,
    *numbers.CHECKS,
    *training.CHECKS,
    *state.CHECKS,
    *decoding.CHECKS,
    *export.CHECKS,
    *frameworks.CHECKS,
    *pairs.CHECKS,
)
