"""Text of a modeling file: headings, names, literals; independent of any plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from minillm_hf.own.copying import CannotWriteError, Key, identifier
from minillm_hf.own.known import names

RESERVED = names(
    "B T C H K D q k v x y z h ops ids keys values queries kept seen call "
    "carry cache start every fields positions self at_in at_mid at_q at_k at_v at_y mask distance "
    "q_in k_in v_in given turn columns"
)
"""Local variables of the generated code."""


def banner(title: str) -> str:
    """Return a section heading."""
    return f"# {'-' * 10} {title} {'-' * (84 - len(title))}\n\n\n"


class Lines(list[str]):
    """The lines of a function's body."""

    def block(self, indent: int) -> str:
        """Join the lines, indented."""
        return "\n".join(" " * indent + line if line else "" for line in self)


def reference(key: Key) -> str:
    """Return the placeholder of a copied definition's name, which is resolved at the end."""
    return f"@{key[0]}:{key[1]}@"


def located(layers: Sequence[int]) -> str:
    """Format layer numbers: ``layer 3``, ``layers 0 to 4, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    said = ", ".join(
        f"{one[0]} to {one[-1]}" if len(one) > 2 else ", ".join(map(str, one)) for one in runs
    )
    return f"layer{'s' if len(layers) > 1 else ''} {said}"


def repr_of(text: str) -> str:
    """Return a text as a literal in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def variable(name: str) -> str:
    """Return the decoder's variable of a batch field, stream or tap."""
    if name == "positions":
        return "positions_of_rows"
    if name == "ids":
        return name
    made = identifier(name)
    return f"{made}_" if made in RESERVED or re.fullmatch(r"rope\d*", made) else made


def given_as(arguments: Mapping[str, str]) -> str:
    """Format the keyword arguments of a call."""
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def path_to(leaf: str) -> str:
    """Return the attribute expression of a module's path."""
    inside = ("qk", "shift", "v_terms", "out", "embed", "streams", "coefficients")
    text, before = "", ""
    for part in leaf.split("."):
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f'["{part}"]' if before in inside else f".{part}"
        before = part
    return text


def plain(value: Any, owner: str) -> Any:
    """Check that a value can be written as a literal, and return it.

    Raises:
        CannotWriteError: it cannot.
    """
    kinds = (int, float, str, bool, type(None))
    if isinstance(value, kinds):
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(plain(one, owner) for one in value)
    raise CannotWriteError(f"{owner} has {value!r:.60}, which cannot be written as a constant")
