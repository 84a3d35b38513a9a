"""Whether a step may update anything, found on the device; what may not is left as it is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["overwrite", "unsound"]


def unsound(figures: Tensor) -> Tensor:
    """0-d float32: 1 where any of the figures is not finite."""
    return 1.0 - torch.isfinite(figures).all().float()


def overwrite(old: Tensor, new: Tensor, skip: Tensor) -> None:
    """``new`` into ``old``, unless ``skip`` (0-d bool)."""
    torch.where(skip, old, new.to(old.dtype), out=old)
