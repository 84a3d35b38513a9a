"""Collectives of torch under names common to all versions, and the usual cause of their errors.

Those of models have gradients. They are torch's functional collectives: an autograd Function that writes into a
buffer in place returns it twice if torch 2.11 compiles it, and its gradient is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from minillm_core import BackendError, MinillmError

# torch 2.13 renames both and warns about the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gathered = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor

FIRST_WITH_GRADIENTS = Version("2.11")
"""The first torch whose functional collectives have gradients."""


LOST = re.compile(r"[Cc]onnection|[Bb]roken pipe|peer(?! access)|remote process")
"""Words that appear only in the errors of gloo and NCCL about another process that has ended."""

STORE = (dist.DistNetworkError, dist.DistStoreError)
"""torch's errors of the connection to the store, whatever they say."""


class Ended(MinillmError):
    """Another process of the run has ended."""


def require_gradients(where: str) -> None:
    """Check that torch's collectives have gradients.

    Raises:
        BackendError: this version's have none.
    """
    if Version(torch.__version__) < FIRST_WITH_GRADIENTS:
        raise BackendError(
            f"torch {torch.__version__} cannot differentiate collectives",
            where=where,
            fix=f"pip install 'torch>={FIRST_WITH_GRADIENTS}'",
        )


def all_gather_autograd(x: Tensor, group: Any) -> Tensor:
    """All-gather: (N x n, ...) from every rank's (n, ...), in rank order; backward is a reduce-scatter."""
    return functional.wait_tensor(_gathered(x.contiguous(), 0, group))


def all_to_all_autograd(x: Tensor, group: Any) -> Tensor:
    """All-to-all of (N, ...): part r is sent to rank r, part s received from rank s; backward reverses it."""
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), None, None, group))


def all_reduce_autograd(x: Tensor, group: Any) -> Tensor:
    """All-reduce (sum) of an array, in the forward and the backward pass."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


@contextmanager
def met() -> Iterator[None]:
    """Convert an error of a lost connection into its usual cause: another process has ended."""
    try:
        yield
    except RuntimeError as error:  # NCCL's has a class, gloo's has none
        text = str(error)
        if not isinstance(error, STORE) and not LOST.search(text):
            raise
        raise Ended(
            "another process of the run has ended",
            where=text.splitlines()[0][:200],
            fix="its own message says why; --resume continues from the last checkpoint",
        ) from error


__all__ = [
    "Ended",
    "all_gather",
    "all_gather_autograd",
    "all_reduce_autograd",
    "all_to_all_autograd",
    "met",
    "reduce_scatter",
    "require_gradients",
]
