"""The seam of divided updates on torch: what one rank of several updates, and how the ranks meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from minillm_core.backends.base import Snapshot
from minillm_core.optim.groups import Group


class Share(Protocol):
    """What this rank updates; all ranks call the same methods in the same order, and only ``whole`` and ``lent`` wait.

    Names of arrays are those of a checkpoint: ``model.<parameter>``,
    ``optimizer.<stage>.<entry>.<parameter>``, ``view.<parameter>``.
    """

    groups: Mapping[str, Group]  # of what is this rank's, by the plan's keys

    def masters(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of the masters of all parameters, without those of other ranks."""
        ...

    def compiler(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return what compiles the function of a micro-batch, made of what usually does."""
        ...

    def accumulate(self, objective: Tensor, *, first: bool) -> None:
        """Run the backward pass; add its gradients, in float32, to those of earlier micro-batches of the step."""

    def warm(self, objective: Tensor) -> None:
        """Run the backward pass, so that it is compiled, and drop its gradients."""

    def scattered(self) -> dict[str, Tensor]:
        """Add up gradients over all ranks; return this rank's parts by parameter."""
        ...

    def gather(self, masters: Mapping[str, Tensor]) -> None:
        """Write every rank's masters into the parameters of all, in their dtype."""

    def part(self, name: str, whole: Any) -> Any:
        """Take this rank's part of an array; None: it has none. What is not divided is returned as it is.

        Raises:
            ValueError: it has another shape.
        """
        ...

    def like(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return arrays as they are when put together, of which this rank's parts can be read alone."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Let any rank compute without gradients inside; at the end wait until none does."""
        ...

    def spread(self, tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield on all ranks what each has of a kind (``view.``), by parameter; those are never cut."""
        ...

    def saved(
        self, tensors: Mapping[str, Tensor], take: Callable[[Mapping[str, Tensor]], Snapshot]
    ) -> Snapshot:
        """Take a snapshot of what this rank writes of a checkpoint: its parts, and rank 0 what is not divided."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Bring all that ranks have to rank 0, on the host, parts put together; empty on others. Waits."""
        ...
