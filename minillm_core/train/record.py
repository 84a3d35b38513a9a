"""run.json and its folder: a run's settings, plan and binding, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillm_core.errors import MinillmError, Refusal
from minillm_core.install import installed_version
from minillm_core.text import did_you_mean, plain, quoted

RUN = "run.json"
ABLATION = "ablation.json"
"""The record of ``minillm ablate``, whose folder is not a run's."""
SPOILT = {ABLATION: "an ablation of minillm ablate", "config.json": "a model directory"}
"""File -> what its folder holds, in words; the files of a run beside it would spoil that."""
LARGEST = 1 << 25
"""Most bytes of a run.json or an ablation.json to read; those of large runs have a few million."""
CHECKPOINTS = "checkpoints"
FILES = {
    CHECKPOINTS: stat.S_ISDIR,
    **dict.fromkeys((RUN, "run.toml", "metrics.jsonl", "tokenizer.json"), stat.S_ISREG),
}
"""File or folder of a run -> check of its mode; a link would lead writes out of the folder."""
RUNS = Path("runs")
KINDS = {"config": dict, "plan_hash": str, "plugins": list | None, "resumed": list | None}
"""Entry of run.json -> its type."""
PACKAGES = ("minillm-core", "numpy", "pydantic", "tokenizers")


def split_run(given: str) -> tuple[str, str]:
    """Split ``RUN[@STEP]`` into the run's folder and the step, empty if none is named."""
    folder, _, step = (given, "", "") if Path(given).exists() else given.rpartition("@")
    return (folder, step) if folder else (given, "")


def names_run(given: object) -> bool:
    """Return whether a value is ``RUN[@STEP]`` with an existing run's folder."""
    return isinstance(given, str) and os.path.lexists(Path(split_run(given)[0]) / RUN)


def choose_out(
    preset: str, given: Path | None = None, *, runs: Path = RUNS, resume: bool = False
) -> Path:
    """Choose a run's folder: ``given``, or runs/<preset>-<first free n>. Writes nothing.

    Raises:
        Refusal: ``given`` holds a run that is not resumed, an ablation or a model directory, or is not
            writable.
    """
    if given is None:
        n = 1
        while (runs / f"{preset}-{n}").exists():
            n += 1
        given = runs / f"{preset}-{n}"
    if not resume:
        refuse_taken(given)
    for name, what in SPOILT.items():
        if os.path.lexists(given / name) and not os.path.lexists(given / RUN):
            raise Refusal(f"{given} holds {what}", where=str(given / name), fix="name a new folder")
    refuse_unwritable(given)
    _refuse_strange(given)
    return given


def _refuse_strange(out: Path) -> None:
    """Refuse a folder in which links or other files have the names of a run's files.

    Raises:
        Refusal: ``checkpoints`` is a link or a file, or a file of a run is a link or not a regular file.
    """
    for name, is_right in FILES.items():
        path = out / name
        try:
            mode = path.lstat().st_mode
        except OSError:  # missing: refuse_unwritable has checked the folder
            continue
        if is_right(mode):
            continue
        if stat.S_ISLNK(mode):
            kind, fix = "a link", f"move the whole folder, and make {out} a link to it"
        else:
            other = "a file" if name == CHECKPOINTS else "not a regular file"
            kind = "a folder" if stat.S_ISDIR(mode) else other
            fix = f"move {path} away, or name another folder"
        raise Refusal(f"{path} is {kind}, which no run creates", where=str(path), fix=fix)


def refuse_unwritable(out: Path) -> None:
    """Refuse a folder, existing or not, that is not writable.

    Raises:
        Refusal: it is not a folder, its parent is not a folder, or this account may not write there.
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
    """Create the folder that :func:`choose_out` chooses, even if another run takes one meanwhile.

    Raises:
        Refusal: as :func:`choose_out`, or the disk refused.
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
        fix = "resume it (train --resume, Run.open), or name another folder"
        raise Refusal(f"{out} holds a run already", where=str(out / RUN), fix=fix)


def note_no_run(out: Path) -> str:
    """Return the note for --resume in a folder without a run, with a folder of a similar name."""
    others = {one.parent.name for one in out.parent.glob(f"*/{RUN}")}
    close = did_you_mean(out.name, others, f"{out.parent}/").rstrip()
    return f"note: there is no run in {out} yet: a new one starts{f' ({close})' * bool(close)}"


def read_record(out: Path) -> dict[str, Any]:
    """Read the run.json of a run.

    Raises:
        Refusal: there is none, or it is not one.
    """
    path = out / RUN
    if not os.path.lexists(path):
        fix = "name the folder that minillm train wrote"
        if (out / "config.json").exists():
            fix = f"{out} looks like a model directory: --init {out} starts from its weights"
        elif names_run(str(out)):
            fix = f"{quoted(split_run(str(out))[0])}: only --branch and --init take RUN@STEP"
        raise Refusal(f"{out} holds no run", where=f"there is no {path}", fix=fix)
    document = read_json(path)
    if wrong := [key for key, kind in KINDS.items() if not isinstance(document.get(key), kind)]:
        fix = "restore it from a copy"
        raise Refusal(f"{path} is not the record of a run", where=", ".join(wrong), fix=fix)
    return document


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that minillm wrote and that may have been changed since, such as run.json.

    Raises:
        Refusal: there is none, or it is a link, not a regular file, not JSON, or larger than any of ours.
    """
    from minillm_core import strict
    from minillm_core.disk import read_file

    try:
        return strict.parse(read_file(path, LARGEST), LARGEST)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        why = "there is no such file" if isinstance(error, OSError) else str(error)
        raise Refusal(
            f"{path.name} cannot be read: {plain(why)}",
            where=str(path),
            fix="restore it from a copy; minillm writes it as a file of JSON, in UTF-8",
        ) from error


class Record:
    """A run.json that is kept up to date; readers see each version whole.

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
        # brings NumPy in, which the first line of a run does not wait for
        from minillm_core import disk

        text = json.dumps(self.document, indent=2, ensure_ascii=False, allow_nan=False)
        # a path that is not UTF-8 has lone surrogates, which JSON writes as escapes
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        with unwritable(self.path):
            disk.replace(self.path, data)


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Turn the disk's errors, while a file of a run is written, into ones that say what to do.

    Raises:
        MinillmError: the disk refused.
    """
    try:
        yield
    except OSError as error:
        raise MinillmError(
            f"{path.name} could not be written: {error.strerror or error}",
            where=str(path),
            fix="make room, or let this account write there; then the same command, or --resume",
        ) from error


def versions(backend: str, distributions: Sequence[str] = ()) -> dict[str, str | None]:
    """List the versions of Python, of what the core stands on, of the framework, and of ``distributions``."""
    names = (*PACKAGES, backend, *distributions)
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: installed_version(name) for name in sorted(set(names))}


def hardware(device_name: str) -> dict[str, Any]:
    """Describe the run's machine, without anything that says whose it is."""
    import psutil

    return {
        "device": device_name,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _unwritable(out: Path, reason: str) -> Refusal:
    return Refusal(f"nothing can be written to {out}", where=reason, fix="name another folder")
