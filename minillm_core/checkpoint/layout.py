"""The paths in OUT/checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from minillm_core.errors import Refusal

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
BEST = "best.json"
"""Marker of the best checkpoint, beside the checkpoints."""
FILES = (MODEL, OPTIMIZER, STATE)
"""Files that a manifest must list; it cannot list itself."""
OF_RANK = re.compile(r"rank-\d{5,}\.safetensors")
"""Further files: arrays, and parts of arrays, written by processes other than the first."""

_CORRUPT = re.compile(r"step-\d{8,}\.corrupt(-\d+)?")
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"(step-\d{8,}\.(tmp|old)|best\.json\.tmp)-[0-9a-f]+")
_HALF = re.compile(  # of disk.replace and Tokenizer.save, and of a lock during a takeover
    r"(run\.(json|toml)|metrics\.jsonl|tokenizer\.json|report\.html)"
    r"\.tmp-[0-9a-f]+|lock\.json\.takeover"
)
_REPLACED = re.compile(r"step-(\d{8,})\.old-[0-9a-f]+")


def of_rank(rank: int) -> str:
    """Return the file name of a process's part of a checkpoint, for all processes but the first."""
    return f"rank-{rank:05d}.safetensors"


def folder(out: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return out / "checkpoints" / f"step-{step:08d}"


def folders(out: Path) -> list[tuple[int, Path]]:
    """List every committed checkpoint as (step, path), newest first, without verification."""
    matches = ((_STEP.fullmatch(path.name), path) for path in _saved(out))
    steps = ((int(match[1]), path) for match, path in matches if match)
    return sorted((one for one in steps if one[1] == folder(out, one[0])), reverse=True)


def corrupt(out: Path) -> list[Path]:
    """List the checkpoints that did not verify and were set aside."""
    return sorted(path for path in _saved(out) if _CORRUPT.fullmatch(path.name))


def replaced(out: Path) -> list[tuple[int, Path]]:
    """List the checkpoints renamed for a newer one of the same step, as (step, path)."""
    matches = ((_REPLACED.fullmatch(path.name), path) for path in _saved(out))
    return sorted((int(match[1]), path) for match, path in matches if match)


def leftovers(out: Path) -> list[Path]:
    """List the leftovers of processes that died while saving."""
    half = [path for path in _entries(out) if _HALF.fullmatch(path.name)]
    return sorted(half + [path for path in _saved(out) if _LEFTOVER.fullmatch(path.name)])


def _saved(out: Path) -> list[Path]:
    return _entries(out / "checkpoints")


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Refusal(
            f"{folder} cannot be read: {error.strerror}",
            where=str(folder),
            fix="make it a folder that this account can read",
        ) from error
