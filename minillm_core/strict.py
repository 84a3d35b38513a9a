"""Strict JSON parsing: one object, no duplicate keys, no NaN, bounded size and depth."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

LARGEST = 1 << 21  # bytes; Python objects can take 30 times as much memory as their text
BITS = 1000  # largest size of an integer: a float can have 1,024


def parse(data: bytes, largest: int = LARGEST) -> dict[str, Any]:
    """Parse an object from untrusted JSON.

    Args:
        data: the text, UTF-8.
        largest: largest size in bytes.

    Raises:
        ValueError: the text is not such an object; with the reason.
    """
    if len(data) > largest:
        raise ValueError(f"more than {largest:,} bytes of JSON")
    try:
        document = json.loads(
            data.decode(),  # json itself would also accept UTF-16
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
    for key, value in pairs:
        numbers = value if isinstance(value, list) else [value]
        if any(type(n) is int and n.bit_length() > BITS for n in numbers):
            raise ValueError(f"{key}: a number that is too large")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is too large")
    return number
