"""The seam of divided updates on torch: what one rank of several updates, and how the ranks meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from minillm_core.optim.groups import Group


class Share(Protocol):
    """What this rank updates; all ranks call the same methods in the same order, and none waits but ``whole``.

    Names of arrays are those of a checkpoint: ``model.<parameter>``,
    ``optimizer.<stage>.<entry>.<parameter>``, ``view.<parameter>``.
    """

    groups: Mapping[str, Group]  # of what is this rank's, by the plan's keys
    sums: list[Tensor]  # where gradients of all parameters are added up, float32: those of `cut`

    def cut(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Cut whole gradients, in the order of the parameters, into the parts of all ranks."""
        ...

    def scattered(self) -> dict[str, Tensor]:
        """Add up ``sums`` over all ranks; return this rank's parts by parameter."""
        ...

    def gather(self, masters: Mapping[str, Tensor]) -> None:
        """Write every rank's masters into the parameters of all, in their dtype."""
        ...

    def part(self, name: str, whole: Any) -> Any:
        """Take this rank's part of an array; None: it has none. What is not divided is returned as it is."""
        ...

    def spread(self, tensors: Mapping[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield on all ranks what each has of a kind (``view.``), by parameter; those are never cut."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Bring all that ranks have to rank 0, on the host, parts put together; empty on others. Waits."""
        ...
