"""The loop's checkpoints: none twice, and everybody is told what became of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minillm_core.train.ending import unsaved
from minillm_core.train.events import Event, Saved, Unsaved
from minillm_core.train.position import Position

if TYPE_CHECKING:
    from minillm_core.train.saving import Saves

__all__ = ["Keeper"]


class Keeper:
    """Begins the saves of a run, and tells of those that ended.

    Args:
        saves: writes them; None: nothing is ever saved.
        position: where the run starts: what is saved already.
        emit: is told every event, in order.
        say: prints a line.
    """

    def __init__(
        self,
        saves: Saves | None,
        position: Position,
        emit: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.saves, self.emit, self.say = saves, emit, say
        self._begun = position.saved  # the step of the last save

    def save(self, position: Position) -> None:
        """Begin one, unless there is one of this step or nothing to save yet."""
        if self.saves and position.step > 0 and self._begun != position.step:
            self._begun = position.step
            self.saves.begin(position)

    def went_back(self, position: Position) -> None:
        """The run stands at an earlier checkpoint again."""
        self._begun = position.step

    def tell(self, position: Position, *, wait: bool = False, last: bool = False) -> None:
        """Tell of the saves that ended, and note the newest.

        Args:
            position: the run's, where the newest is noted.
            wait: for those that are under way.
            last: nobody comes after them to write what they lack.

        Raises:
            MinillmError: the last one could not be written.
        """
        if self.saves is None:
            return
        for event in self.saves.wait() if wait else self.saves.finished():
            if isinstance(event, Saved):
                position.saved = event.step
            self.emit(event)
            if isinstance(event, Unsaved) and last and event.step == position.step:
                raise unsaved(event.reason, position)

    def settle(self, position: Position, *, wait: bool = True) -> None:
        """The same where something else failed, which stays the error to report."""
        try:  # a save that is under way is worth waiting for, unless somebody is in a hurry
            self.tell(position, wait=wait)
        except Exception as another:
            self.say(f"warning: {another}")
