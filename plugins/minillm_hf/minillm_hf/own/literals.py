"""Texts of a modeling file: headings, names, literals; nothing here knows a plan."""

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
"""Names of variables in what is written."""


def banner(title: str) -> str:
    """Write a heading of a file."""
    return f"# {'-' * 10} {title} {'-' * (84 - len(title))}\n\n\n"


class Lines(list[str]):
    """Lines of a function's body."""

    def block(self, indent: int) -> str:
        """Join them, indented."""
        return "\n".join(" " * indent + line if line else "" for line in self)


def reference(key: Key) -> str:
    """Stand for the name of a copied definition, which is settled at the end."""
    return f"@{key[0]}:{key[1]}@"


def located(layers: Sequence[int]) -> str:
    """Write layers: ``layer 3``, ``layers 0 to 4, 7``."""
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
    """Write a text as a literal, in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def variable(name: str) -> str:
    """Name a batch field, stream or tap in the decoder."""
    if name == "positions":
        return "positions_of_rows"
    if name == "ids":
        return name
    made = identifier(name)
    return f"{made}_" if made in RESERVED or re.fullmatch(r"rope\d*", made) else made


def given_as(arguments: Mapping[str, str]) -> str:
    """Write arguments of a call by their names."""
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def path_to(leaf: str) -> str:
    """Write the attribute that a path leads to."""
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
    """Return a value that can be written as a literal.

    Raises:
        CannotWriteError: it cannot.
    """
    kinds = (int, float, str, bool, type(None))
    if isinstance(value, kinds):
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(plain(one, owner) for one in value)
    raise CannotWriteError(f"{owner} has {value!r:.60}, which cannot be written as a constant")
