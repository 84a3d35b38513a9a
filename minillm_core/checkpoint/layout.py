"""What lies where in OUT/checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["FILES", "MANIFEST", "MODEL", "OPTIMIZER", "STATE", "folder", "folders", "leftovers"]

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
"""What a manifest must list; it cannot list itself."""

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")


def folder(out: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return out / "checkpoints" / f"step-{step:08d}"


def folders(out: Path) -> list[tuple[int, Path]]:
    """Every committed checkpoint as (step, path), newest first; not yet verified."""
    found = []
    for path in _entries(out):
        match = _STEP.fullmatch(path.name)
        if match and path == folder(out, int(match[1])):
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def leftovers(out: Path) -> list[Path]:
    """What a process that died while saving left behind."""
    return sorted(path for path in _entries(out) if _LEFTOVER.fullmatch(path.name))


def _entries(out: Path) -> list[Path]:
    try:
        return list((out / "checkpoints").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
