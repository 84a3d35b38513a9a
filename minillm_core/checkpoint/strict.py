"""JSON without its looseness: one object, no key twice, no NaN, no more depth than there is stack."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

__all__ = ["LARGEST", "parse"]

LARGEST = 1 << 21  # bytes; Python objects can take 30 times as much memory as their text


def parse(data: bytes) -> dict[str, Any]:
    """An object from JSON that comes from a disk.

    Raises:
        ValueError: the reason why it is none.
    """
    if len(data) > LARGEST:
        raise ValueError(f"more than {LARGEST:,} bytes of JSON")
    try:
        document = json.loads(
            data.decode(),  # json itself would take UTF-16 too
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the same key twice")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is too large")
    return number
