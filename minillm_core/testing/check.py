"""One check: what it proves, and how it says what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from minillm_core.errors import MinillmError
from minillm_core.plugins.guard import own_frames
from minillm_core.text import plain

if TYPE_CHECKING:
    from minillm_core.testing.subject import Subject

__all__ = ["Check", "Failed", "NotApplicable", "Outcome", "Verdict"]

Verdict = Literal["passed", "failed", "not applicable", "not run"]

RAISED = "the plugin's own code at this line, or what it hands to the core there"


class Failed(Exception):
    """A check's property does not hold.

    Args:
        found: the numbers, or the line that shows it.
        cause: the likely cause, and what to change.
    """

    def __init__(self, found: str, *, cause: str) -> None:
        super().__init__(found)
        self.found, self.cause = found, cause


class NotApplicable(Exception):
    """The property says nothing about this plugin, or cannot be looked at here; the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a check found."""

    verdict: Verdict
    found: str  # numbers, or the reason why it was not run
    cause: str | None = None  # likely; of a failure
    error: BaseException | None = field(default=None, compare=False, repr=False)  # what was raised


@dataclass(frozen=True)
class Check:
    """A property that every plugin has."""

    name: str
    proves: str  # one line
    look: Callable[[Subject], str]  # returns the numbers; raises Failed, NotApplicable
    needs: tuple[str, ...] = ()  # checks without which this one says nothing

    def run(self, subject: Subject) -> Outcome:
        """Look, whatever the plugin raises on the way."""
        try:
            return Outcome("passed", self.look(subject))
        except NotApplicable as reason:
            return Outcome("not applicable", str(reason))
        except Failed as failure:
            return Outcome("failed", failure.found, failure.cause, failure)
        except MinillmError as error:
            lines = [error.what, *(error.where or "").splitlines()]
            found = "\n".join(filter(None, map(plain, lines)))
            return Outcome("failed", found, error.fix, error)
        except (Exception, SystemExit) as error:  # out of a node or a stage; hooks are contained
            found = f"{type(error).__name__}: {_place(error, subject)}"
            return Outcome("failed", found, RAISED, error)


def _place(error: BaseException, subject: Subject) -> str:
    """What it says, and the innermost line of the plugin's own that it passed."""
    said = plain(str(error), limit=600) or "no message"
    try:
        own = own_frames(error, subject.found.origin.root)
    except MinillmError:
        own = []
    return f"{said}\n{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else said
