"""run.json and the folder it lies in: what a run was told, what it became, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minillm_core.checkpoint import disk
from minillm_core.errors import Refusal

__all__ = [
    "ABLATION",
    "RUN",
    "Record",
    "choose_out",
    "claim_out",
    "hardware",
    "read_record",
    "refuse_taken",
    "refuse_unwritable",
    "versions",
]

RUN = "run.json"
ABLATION = "ablation.json"
"""What ``minillm ablate`` writes, in a folder that is no run's."""
RUNS = Path("runs")
PACKAGES = ("minillm-core", "numpy", "pydantic", "safetensors", "tokenizers")
FRAMEWORKS = {"torch": ("torch",), "mlx": ("mlx",), "numpy": ()}


def choose_out(
    preset: str, given: Path | None = None, *, runs: Path = RUNS, resume: bool = False
) -> Path:
    """Where a run may write: ``given``, or runs/<preset>-<first free n>. Writes nothing.

    Raises:
        Refusal: ``given`` holds a run and it is not to go on, or an ablation, or nothing can be
            written there.
    """
    if given is None:
        n = 1
        while (runs / f"{preset}-{n}").exists():
            n += 1
        given = runs / f"{preset}-{n}"
    if not resume:
        refuse_taken(given)
    if os.path.lexists(given / ABLATION):  # a run there, and the ablation could not go on
        raise Refusal(
            f"{given} holds an ablation of minillm ablate",
            where=str(given / ABLATION),
            fix="--out with another folder",
        )
    refuse_unwritable(given)
    return given


def refuse_unwritable(out: Path) -> None:
    """Refuse a folder that nothing can be written to, there or not yet.

    Raises:
        Refusal: it is no folder, lies in none, or this account may not write there.
    """
    place = out
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise _unwritable(out, f"{place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unwritable(out, f"no permission to write in {place}")


def claim_out(
    preset: str, given: Path | None = None, *, runs: Path = RUNS, resume: bool = False
) -> Path:
    """Make the folder that :func:`choose_out` chooses, even if another run takes one meanwhile.

    Raises:
        Refusal: as there, or the disk refused.
    """
    while True:
        out = choose_out(preset, given, runs=runs, resume=resume)
        try:
            out.mkdir(parents=True, exist_ok=given is not None)
        except FileExistsError:
            if given is None:
                continue
            raise _unwritable(out, f"{out} is not a folder") from None
        except OSError as error:
            raise _unwritable(out, str(error.strerror)) from error
        return out


def refuse_taken(out: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        Refusal: it does.
    """
    if os.path.lexists(out / RUN):
        raise Refusal(
            f"{out} holds a run already",
            where=str(out / RUN),
            fix="--resume to go on with it, or --out with another folder",
        )


def read_record(out: Path) -> dict[str, Any]:
    """The run.json of a run.

    Raises:
        Refusal: there is none, or it is not one.
    """
    path = out / RUN
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise Refusal(
            f"{out} holds no run",
            where=f"{path}: {error.strerror}",
            fix="name the folder that minillm train wrote",
        ) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not JSON", where=str(error)[:200]) from error
    if not isinstance(document, dict) or "config" not in document or "plan_hash" not in document:
        raise Refusal(f"{path} is not the record of a run", where="config, plan_hash")
    return document


class Record:
    """Keeps run.json up to date; readers see each version whole.

    Args:
        out: the run's folder.
        document: everything but ``exit``, which is null until the run is over.
    """

    def __init__(self, out: Path, document: Mapping[str, Any]) -> None:
        self.path = out / RUN
        self.document = {**document, "exit": None}
        self._write()

    def update(self, **changes: Any) -> None:
        """Change some entries."""
        self.document.update(changes)
        self._write()

    def _write(self) -> None:
        text = json.dumps(self.document, indent=2, ensure_ascii=False, allow_nan=False)
        disk.replace(self.path, text.encode() + b"\n")


def versions(backend: str, distributions: Sequence[str] = ()) -> dict[str, str | None]:
    """Versions of Python, of what the core stands on, of the framework, and of ``distributions``."""
    names = (*PACKAGES, *FRAMEWORKS.get(backend, (backend,)), *distributions)
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in sorted(set(names)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            found[name] = None
    return found


def hardware(device_name: str) -> dict[str, Any]:
    """What the run's machine is; nothing that says whose it is."""
    return {
        "device": device_name,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": _cores(),
        "memory_bytes": _memory(),
    }


def _cores() -> int | None:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _unwritable(out: Path, reason: str) -> Refusal:
    return Refusal(
        f"nothing can be written to {out}", where=reason, fix="--out with another folder"
    )
