"""Tables that are updated by rows, as a trainer on torch asks of them: written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from minillm_core.backends.tables import Tables
from minillm_core.optim.groups import Member

Tensors = Mapping[str, Tensor]


class TorchTables(Tables):
    """The tables, their state, and the rows of the step; a table's parameter holds those, and nothing between.

    It is made of rules by table, the plan, the trainer's weights, its framework object, and what
    compiles a function where the binding says so. ``updates`` is 0-d float32: how many there were.

    Attributes:
        sizes: how many rows of each table the step holds.
        words: the same in words, for people.
    """

    sizes: tuple[int, ...] = ()
    words: str = ""

    def take(
        self,
        rows: Tensors,
        updates: Tensor,
        values: Tensors,
        compiling: Callable[[str], AbstractContextManager[None]] | None,
    ) -> None:
        """Let the parameters be the rows of the step, brought up to date.

        Args:
            rows: by table, int32 (S,).
            updates: see the class.
            values: schedule value -> 0-d float32.
            compiling: entered, with words, around what is compiled for sizes that were not met
                before; None: the step is eager.
        """

    def step(
        self, grads: Tensors, factor: Tensor, updates: Tensor, values: Tensors, found: Tensor
    ) -> None:
        """Update the rows of the step, unless ``found`` is 1, and those that are next in turn.

        Args:
            grads: name -> float32, of tables (S, C).
            factor: 0-d float32, multiplies every gradient.
            updates: this one not included.
            values: schedule value -> 0-d float32.
            found: 0-d float32, 1 where this update must not happen.
        """

    def viewed(self, updates: Tensor) -> Iterable[tuple[Member, Tensor, Tensors]]:
        """Bring tables up to date that have a view, one by one: see :func:`minillm_core.optim.views.views_of`."""
        return ()

    def place(self, updates: Tensor) -> None:
        """Let the parameters be whole tables, to be evaluated and sampled from, until the next step."""

    def leave(self) -> None:
        """Give the memory of whole tables back; they are made anew from masters that were written."""

    def arrays(self, updates: Tensor) -> dict[str, Tensor]:
        """Return what a snapshot has of the tables, as :meth:`packed` takes it."""
        return {}

    def saved(self) -> dict[str, Tensor]:
        """Return the state by its names in a checkpoint, as it lies on the device."""
        return {}
