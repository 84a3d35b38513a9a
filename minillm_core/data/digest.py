"""Names for content: 32 hexadecimal digits of xxh3-128, for change and damage, not for attack."""

from __future__ import annotations

import numpy as np
import xxhash

__all__ = ["Digest", "digest"]


class Digest:
    """A running digest of strings, bytes and arrays."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, content: str | bytes | np.ndarray) -> Digest:
        """Add some content; arrays by their bytes."""
        if isinstance(content, str):
            self._state.update(content.encode())
        elif isinstance(content, bytes):
            self._state.update(content)
        else:
            self._state.update(np.ascontiguousarray(content).data)
        return self

    def hex(self) -> str:
        """The digest so far."""
        return self._state.hexdigest()


def digest(*contents: str | np.ndarray) -> str:
    """The digest of several pieces of content, one after the other."""
    state = Digest()
    for content in contents:
        state.update(content)
    return state.hex()
