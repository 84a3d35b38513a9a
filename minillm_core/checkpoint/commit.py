"""The commit protocol: everything into a temporary folder, the manifest last, one rename."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from minillm_core.checkpoint import disk, layout, manifest
from minillm_core.errors import MinillmError, NonFinite

__all__ = ["commit", "retain", "sweep"]


def commit(
    out: Path, step: int, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any]
) -> Path:
    """Write a checkpoint; a kill at any moment leaves the ones before it as they were.

    Args:
        out: the run's folder.
        step: how many optimizer steps the state has seen.
        arrays: by name; ``model.*`` go to a file of their own.
        scalars: whatever JSON can hold.

    Returns:
        OUT/checkpoints/step-<step>.

    Raises:
        NonFinite: an array holds a NaN or an infinity.
        MinillmError: the disk refused; nothing of this checkpoint is left on it.
    """
    _refuse_non_finite(step, arrays)
    target = layout.folder(out, step)
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    state = json.dumps(dict(scalars), indent=1, sort_keys=True, allow_nan=False).encode()
    try:
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True)
            disk.sync(out)
        temporary.mkdir()
        _write_tensors(temporary / layout.MODEL, arrays, model=True)
        _write_tensors(temporary / layout.OPTIMIZER, arrays, model=False)
        disk.write(temporary / layout.STATE, state)
        disk.write(temporary / layout.MANIFEST, manifest.encode(temporary, step))
        disk.sync(temporary)
        disk.rename(temporary, target)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        size = sum(array.nbytes for array in arrays.values()) + len(state)
        raise MinillmError(
            f"the checkpoint of step {step} could not be written: {error}",
            where=f"{target}, {size / 1e6:,.1f} MB",
            fix="earlier checkpoints are as they were; make room, or set checkpoint.every=0",
        ) from error
    return target


def retain(out: Path, keep: int) -> list[Path]:
    """Remove what is older than the newest ``keep`` checkpoints that verify; returns what went.

    One that does not verify neither counts nor is removed before that many good ones are there.
    """
    committed = [path for _, path in layout.folders(out)]
    good = 0
    for place, path in enumerate(committed):
        if len(committed) <= keep or good == keep:
            return [_remove(old) for old in committed[place:]] if good == keep else []
        good += not manifest.verify(path)
    return []


def _remove(path: Path) -> Path:
    # renamed first: a kill in between leaves something that is swept, not half a checkpoint
    doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    disk.rename(path, doomed)
    shutil.rmtree(doomed)
    return path


def sweep(out: Path) -> list[Path]:
    """Remove what processes that died while saving left in ``out``; only its one trainer may."""
    found = layout.leftovers(out)
    for path in found:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    return found


def _write_tensors(path: Path, arrays: Mapping[str, np.ndarray], *, model: bool) -> None:
    # safetensors reads an array's memory from its address on, whatever its strides.
    chosen = {
        name: np.asarray(array, order="C")
        for name, array in sorted(arrays.items())
        if name.startswith("model.") == model
    }
    save_file(chosen, path, metadata={"format": "np"})
    disk.sync(path)


def _refuse_non_finite(step: int, arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        # min and max carry a NaN along and need no mask as large as the array
        if array.dtype.kind == "f" and array.size:
            low, high = array.min(), array.max()
            if not (np.isfinite(low) and np.isfinite(high)):
                raise NonFinite(
                    f"{name} is no longer finite after step {step}; it was not saved",
                    fix="lower train.lr, or go on from an earlier checkpoint",
                )
