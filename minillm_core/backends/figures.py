"""A step's figures by name, as both frameworks hand them over, and what they say of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from minillm_core.backends.base import StepResult

__all__ = ["SMALLEST_SCALE", "TERM", "step_result"]

TERM = "term."
"""Before the key of a loss term or of a further target."""

SMALLEST_SCALE = 1.0
"""Of float16's loss: gradients that leave the range even so are at fault themselves."""


def step_result(figures: Mapping[str, float]) -> StepResult:
    """What a trainer reads.

    Args:
        figures: ``loss``, ``grad_norm``, ``objective`` (what was differentiated, times the loss
            scale), ``skipped`` (1.0: the update was not made), ``term.<key>``; in float16 ``scale``,
            the loss scale of this step.
    """
    terms = {k.removeprefix(TERM): v for k, v in figures.items() if k.startswith(TERM)}
    loss, skipped = figures["loss"], figures["skipped"] > 0
    above = figures.get("scale", SMALLEST_SCALE) > SMALLEST_SCALE
    sound = all(math.isfinite(figure) for figure in (loss, *terms.values()))
    return StepResult(
        loss, figures["grad_norm"], terms, skipped=skipped, overflow=skipped and above and sound
    )
