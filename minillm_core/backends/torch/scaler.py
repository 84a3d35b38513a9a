"""Loss scaling for float16, on the device: nothing is read back (arXiv:1710.03740)."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm_core.backends.figures import SMALLEST_SCALE

__all__ = ["LossScaler"]

START, LARGEST = 2.0**16, 2.0**24
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


class LossScaler:
    """A scale that halves when gradients leave float16's range, and doubles after 2,000 good steps."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), START, device=device)
        self.good = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)

    @torch.no_grad()
    def judge(self, found: Tensor) -> None:
        """Move the scale for the next step; ``found``: 0-d float32, 1 where this one is skipped."""
        good = (self.good + 1) * (1 - found)
        grow = (good >= INTERVAL).float()
        scale = self.scale * torch.where(found > 0, BACKOFF, 1 + grow * (GROWTH - 1))
        self.scale.copy_(scale.clamp(SMALLEST_SCALE, LARGEST))
        self.good.copy_(good * (1 - grow))
        self.skipped.add_(found)

    @torch.no_grad()
    def restart(self) -> None:
        """Forget every step."""
        self.scale.fill_(START)
        self.good.zero_()
        self.skipped.zero_()

    def arrays(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}
