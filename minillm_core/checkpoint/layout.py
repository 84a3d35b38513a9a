"""What lies where in OUT/checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = [
    "FILES",
    "MANIFEST",
    "MODEL",
    "OPTIMIZER",
    "STATE",
    "corrupt",
    "folder",
    "folders",
    "leftovers",
    "replaced",
]

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
"""What a manifest must list; it cannot list itself."""

_CORRUPT = re.compile(r"step-\d{8,}\.corrupt(-\d+)?")
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|old)-[0-9a-f]+")
_HALF = re.compile(r"(run\.json|metrics\.jsonl)\.tmp-[0-9a-f]+")  # of disk.replace
_REPLACED = re.compile(r"step-(\d{8,})\.old-[0-9a-f]+")


def folder(out: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return out / "checkpoints" / f"step-{step:08d}"


def folders(out: Path) -> list[tuple[int, Path]]:
    """Every committed checkpoint as (step, path), newest first; not yet verified."""
    found = []
    for path in _saved(out):
        match = _STEP.fullmatch(path.name)
        if match and path == folder(out, int(match[1])):
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def corrupt(out: Path) -> list[Path]:
    """What did not verify and was set aside."""
    return sorted(path for path in _saved(out) if _CORRUPT.fullmatch(path.name))


def replaced(out: Path) -> list[tuple[int, Path]]:
    """What gave up its name to a newer one of the same step, as (step, path)."""
    matches = ((_REPLACED.fullmatch(path.name), path) for path in _saved(out))
    return sorted((int(match[1]), path) for match, path in matches if match)


def leftovers(out: Path) -> list[Path]:
    """What a process that died while saving left behind."""
    half = [path for path in _entries(out) if _HALF.fullmatch(path.name)]
    return sorted(half + [path for path in _saved(out) if _LEFTOVER.fullmatch(path.name)])


def _saved(out: Path) -> list[Path]:
    return _entries(out / "checkpoints")


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
