"""Where a number stands: a constant, or a named schedule value read while the step runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """A number, or the name of a schedule value that holds it."""

    owner: str
    constant: float | int | None = None
    value: str | None = None

    def of(self, reads: Mapping[str, Any]) -> Any:
        """The number: a constant of the compiled step, or one of its inputs."""
        return self.constant if self.value is None else reads[self.value]

    def data(self) -> dict[str, Any]:
        """As JSON."""
        number = self.constant if self.value is None else {"value": self.value}
        return {"owner": self.owner, "number": number}
