"""A check: the property that it proves, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from minillm_core import MinillmError
from minillm_core.commands import plain
from minillm_core.inspection import own_frames

if TYPE_CHECKING:
    from minillm_kit.subject import Subject

Verdict = Literal["passed", "failed", "not applicable", "not run"]

RAISED = "the plugin's own code at this line, or what it hands to the core there"
NOT_FINITE = "a division by 0, or a logarithm or a root of what may be 0 or negative"


class HostRead(Exception):
    """Code reads a number of an array: in each step the host would wait for the device.

    Args:
        stack: where, as in a traceback.
    """

    def __init__(self, stack: str = "") -> None:
        super().__init__("a number of an array is read on the host")
        self.stack = stack


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
    """The property does not apply to this plugin, or cannot be checked here; holds the reason."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check."""

    verdict: Verdict
    found: str  # numbers, or the reason why it was not run
    cause: str | None = None  # likely; of a failure
    error: BaseException | None = field(default=None, compare=False, repr=False)  # of a failure


@dataclass(frozen=True)
class Check:
    """A property that every plugin must have."""

    name: str
    proves: str  # one line
    look: Callable[[Subject], str]  # returns the numbers; raises Failed, NotApplicable
    needs: tuple[str, ...] = ()  # checks that this one depends on

    def run(self, subject: Subject) -> Outcome:
        """Run the check on the plugin; any exception becomes an outcome."""
        try:
            return Outcome("passed", self.look(subject))
        except NotApplicable as reason:
            return Outcome("not applicable", str(reason))
        except Failed as failure:
            return Outcome("failed", failure.found, failure.cause, failure)
        except MinillmError as error:
            lines = [error.what, *(error.where or "").splitlines(), error.line or ""]
            found = "\n".join(filter(None, map(plain, lines)))
            return Outcome("failed", found, error.fix, error)
        except (Exception, SystemExit) as error:  # from a node or a stage; hooks are wrapped
            found = f"{type(error).__name__}: {place(error, subject)}"
            return Outcome("failed", found, RAISED, error)


def raised(error: BaseException) -> str:
    """Describe an error in one line: its type and message."""
    return plain(f"{type(error).__name__}: {error}", 200)


def place(error: BaseException, subject: Subject) -> str:
    """Return an error's message, and the innermost line of the plugin's code in its traceback."""
    said = plain(str(error), limit=600) or "no message"
    return "\n".join(filter(None, (said, own_line(error, subject))))


def own_line(error: BaseException, subject: Subject) -> str | None:
    """Return the innermost line of the plugin's code in an error's traceback; None: there is none."""
    try:
        own = own_frames(error, subject.found.origin.root)
    except MinillmError:
        return None
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else None
