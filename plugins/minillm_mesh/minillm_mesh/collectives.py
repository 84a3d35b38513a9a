"""Collectives of torch under names common to all versions, and the usual cause of their errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from minillm_core import MinillmError

# torch 2.13 renames both and warns about the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ended(MinillmError):
    """Another process of the run has ended."""


@contextmanager
def met() -> Iterator[None]:
    """Convert an error of a collective into its usual cause: another process has ended."""
    try:
        yield
    except RuntimeError as error:  # torch's own, or gloo's, which has no class
        text, ours = str(error), isinstance(error, dist.DistError)
        if not ours and "onnection" not in text and "peer" not in text:
            raise
        raise Ended(
            "another process of the run has ended",
            where=text.splitlines()[0][:200],
            fix="its own message says why; --resume continues from the last checkpoint",
        ) from error


__all__ = ["Ended", "all_gather", "met", "reduce_scatter"]
