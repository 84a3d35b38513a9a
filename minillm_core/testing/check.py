"""One check: what it proves, and how it says what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from minillm_core.errors import MinillmError

if TYPE_CHECKING:
    from minillm_core.testing.subject import Subject

__all__ = ["Check", "Failed", "NotApplicable", "Outcome", "Verdict"]

Verdict = Literal["passed", "failed", "not applicable", "not run"]


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
            return Outcome("failed", failure.found, failure.cause)
        except MinillmError as error:
            return Outcome("failed", str(error), error.fix)
        except Exception as error:
            cause = "raised outside the plugin's hooks: see its traceback with --debug"
            return Outcome("failed", f"{type(error).__name__}: {error}", cause)
