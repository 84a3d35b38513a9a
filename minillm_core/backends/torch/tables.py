"""The interface of tables that are updated by rows, for the trainer on torch: written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from minillm_core.backends.tables import Tables
from minillm_core.optim.groups import Member

Tensors = Mapping[str, Tensor]


class TorchTables(Tables):
    """The tables, their optimizer state, and the rows of the current step; a table's parameter holds only these.

    Constructed from the rules by table, the plan, the trainer's weights, its framework object, and the
    function that compiles if the binding compiles. ``updates`` is 0-d float32: the number of updates so far.

    Attributes:
        sizes: how many rows of each table the step holds.
        words: the same, as text for messages.
    """

    sizes: tuple[int, ...] = ()
    words: str = ""

    def load_rows(
        self,
        rows: Tensors,
        updates: Tensor,
        values: Tensors,
        compiling: Callable[[str], AbstractContextManager[None]] | None,
    ) -> None:
        """Set the parameters to the rows of the step, brought up to date.

        Args:
            rows: the rows by table, int32 (S,).
            updates: see the class.
            values: schedule value -> 0-d float32.
            compiling: the context to enter, with a text, around a compilation for new sizes; None:
                eager mode.
        """

    def step(
        self, grads: Tensors, factor: Tensor, updates: Tensor, values: Tensors, found: Tensor
    ) -> None:
        """Update the rows of the step, unless ``found`` is 1; bring the rows of ``RowRule.in_turn`` up to date.

        Args:
            grads: name -> float32 gradient, of tables (S, C).
            factor: 0-d float32, multiplies every gradient.
            updates: the number of updates, without this one.
            values: schedule value -> 0-d float32.
            found: 0-d float32, 1 to skip this update.
        """

    def view_inputs(self, updates: Tensor) -> Iterable[tuple[Member, Tensor, Tensors]]:
        """Yield tables that have a view, up to date, one by one: see :func:`minillm_core.optim.views.views_of`."""
        return ()

    def place_whole(self, updates: Tensor) -> None:
        """Set the parameters to whole tables, for evaluation and sampling until the next step."""

    def free_whole(self) -> None:
        """Free the memory of whole tables; the next :meth:`place_whole` computes them again, from the new masters."""

    def arrays(self, updates: Tensor) -> dict[str, Tensor]:
        """Return the arrays of the tables for a snapshot, as :meth:`packed` takes them."""
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state on the device, by their names in a checkpoint."""
        return {}
