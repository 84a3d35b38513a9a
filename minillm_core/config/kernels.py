"""The kernel policy, ``--kernels``: a mode for all ops, and kernels by name for single ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minillm_core.errors import ConfigError

REFERENCE = "reference"
"""The reference kernels: of all ops as a mode, of one op as ``op=reference``."""

MODES = ("auto", "strict", REFERENCE)


@dataclass(frozen=True)
class Policy:
    """A mode for all ops, and required kernels by name, which override the mode for their ops."""

    mode: str = "auto"
    named: Mapping[str, str] = field(default_factory=dict)  # op -> candidate, or REFERENCE

    def naming(self, op: str, kernel: str) -> Policy:
        """Return the same policy with ``kernel`` for ``op``."""
        return Policy(self.mode, {**self.named, op: kernel})

    def __str__(self) -> str:
        named = [f"{op}={kernel}" for op, kernel in self.named.items()]
        return ",".join(named if self.mode == "auto" and named else [self.mode, *named])


AUTO = Policy()


def parse_policy(text: str) -> Policy:
    """Parse ``auto``, ``strict`` or ``reference``, any number of ``op=name``, or both, between commas.

    Raises:
        ConfigError: another word, none, two modes, or an op named twice.
    """
    modes: list[str] = []
    named: dict[str, str] = {}
    for word in (part.strip() for part in text.split(",")):
        op, equals, name = (part.strip() for part in word.partition("="))
        if equals and op in named:
            raise ConfigError(
                f"{op} is named twice",
                where=f"--kernels {text}",
                fix="keep one: " + " or ".join(f"{op}={k}" for k in {named[op]: 0, name: 0} if k),
            )
        if equals and op and name:
            named[op] = name
        elif not equals and op in MODES and not modes:
            modes.append(op)
        else:
            raise ConfigError(
                f"'{word}' is not a policy for kernels",
                where=f"--kernels {text}",
                fix="auto, strict or reference, op=name, or both, each once, between commas: "
                "--kernels strict,attention=sdpa",
            )
    return Policy(modes[0] if modes else "auto", named)
