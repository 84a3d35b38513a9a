"""The interface of sharded updates on torch: a rank's share, and the collectives between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from minillm_core.backends.base import Snapshot
from minillm_core.optim.groups import Group


class Share(Protocol):
    """This rank's share of the parameters and optimizer state.

    All ranks call the same methods in the same order; only ``gather`` and ``inference_context`` wait.
    Names of arrays are those of a checkpoint: ``model.<parameter>``,
    ``optimizer.<stage>.<entry>.<parameter>``, ``view.<parameter>``.
    """

    groups: Mapping[str, Group]  # the parameter groups of this rank's share, by the plan's keys

    def masters(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return only this rank's parts of the master weights, as updates read them."""
        ...

    def held(self, masters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the master weights as this rank holds and saves them."""
        ...

    def compiler(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiler for micro-batch functions, derived from the usual one."""
        ...

    def accumulate(self, objective: Tensor, *, first: bool, last: bool) -> None:
        """Run the backward pass; accumulate its gradients over micro-batches, in float32 unless it is the only one."""

    def warm(self, objective: Tensor) -> None:
        """Run the backward pass to compile it, and drop its gradients."""

    def reduce_scatter(self) -> dict[str, Tensor]:
        """Reduce-scatter the gradients; return this rank's parts, by parameter."""
        ...

    def all_gather(self, masters: Mapping[str, Tensor]) -> None:
        """All-gather the masters of all ranks into the parameters, in the compute dtype."""

    def part(self, name: str, whole: Any) -> Any:
        """Return this rank's part of an array, or None if it has none; an array that is not sharded as it is.

        Raises:
            ValueError: the array has another shape.
        """
        ...

    def placeholders(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return arrays of the whole shapes, of which only this rank's parts can be read."""
        ...

    def inference_context(self) -> AbstractContextManager[None]:
        """Return a context in which any rank may compute without gradients; on exit wait for all ranks."""
        ...

    def gather_kind(self, tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield on all ranks every rank's tensors of a kind (``view.``), by parameter; each rank's are whole."""
        ...

    def snapshot(
        self, tensors: Mapping[str, Tensor], take: Callable[[Mapping[str, Tensor]], Snapshot]
    ) -> Snapshot:
        """Take a snapshot of the arrays that this rank saves: its parts, and on rank 0 the unsharded ones."""
        ...

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Gather all arrays on rank 0, on the host, joined from their parts; empty on other ranks. Waits."""
        ...
