"""The folders that outlive a run (token cache, tokenizers, cards); the only reader of the environment for them."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$MINILLM_CACHE``, or minillm's folder in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    if own := os.environ.get("MINILLM_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "minillm"


def data_folder() -> Path:
    """Return the folder of results to keep: minillm's in ``$XDG_DATA_HOME``, ``~/.local/share``."""
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "minillm"
