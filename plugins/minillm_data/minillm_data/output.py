"""The folder that a command writes: there whole or not at all, and continued after a kill.

While a command works, its folder is ``NAME.unfinished`` beside the one to be. Each part in it gets
its name when it is whole, and ``progress.json`` says after which row that was, or how long the part
was after a later one; the next start of the same command on the same files goes on behind it. The
last act is one rename.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from minillm_core import DataError, Interrupted
from minillm_core.commands import counted
from minillm_core.documents import Source, replace_file

PART = 64 << 20
"""Bytes of a part, about."""

NOTED = 10.0
"""Seconds between two notes of how far the work is: what an interruption costs at the most."""

_STATE, _LOCK, REPORT = "progress.json", ".lock", "report.json"
_PAGE = "report.htm"  # the .html files of a folder are text that is trained on


def key_of(command: str, sources: list[Source], **arguments: Any) -> str:
    """Digest what decides the result: the command, its arguments, and each file's place, size and time."""
    files = [[str(one.path.resolve()), one.size, one.modified] for one in sources]
    told = json.dumps([command, files, arguments], sort_keys=True, default=str)
    return xxhash.xxh3_128(told.encode()).hexdigest()


def check_outside(folder: Path, paths: Sequence[str | Path]) -> None:
    """Check that a folder to be written is in none of those that are read.

    Raises:
        DataError: it is: the next start would read what the last one wrote.
    """
    parents = folder.expanduser().resolve().parents
    for path in paths:
        if (read := Path(path).expanduser().resolve()) in parents:
            raise DataError(
                "the folder to write is inside one that is read",
                where=f"{folder}, in {read}",
                fix="name a folder elsewhere with --to",
            )


@dataclass
class State:
    """What an unfinished folder holds.

    Attributes:
        key: of the command, see :func:`key_of`.
        rows: rows of the input that are dealt with.
        parts: names of the whole parts, in order.
        open: bytes of the part that is being written.
        counts: of rows, by what became of them.
        more: what the command itself has to remember, as JSON.
    """

    key: str
    rows: int = 0
    parts: list[str] = field(default_factory=list)
    open: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    more: dict[str, Any] = field(default_factory=dict)

    def data(self) -> bytes:
        """Write it as JSON."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read one; None where there is none, or none that can be read."""
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "counts": Counter(found["counts"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Output:
    """A folder of JSON lines that is being written; a context manager.

    ::

        with Output(to, key_of("filter", rows.sources, rules=rules)) as output:
            for row in islice(rows, output.state.rows, None):
                output.state.counts["kept"] += 1
                output.write(row.line)
                output.dealt_with()
            output.finish({"command": "filter", ...})

    Args:
        folder: the one to be; must not exist, or be empty.
        key: of the command.
        own: names of files that the command keeps in the folder until it is finished.

    Attributes:
        state: what an earlier start of the same command left behind, or a new one.
        folder: the one that is written to until :meth:`finish`.

    Raises:
        DataError: the folder is there, cannot be made, or is being written by another process.
    """

    def __init__(self, folder: Path, key: str, own: tuple[str, ...] = ()) -> None:
        self.to, self._own = folder, own
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise DataError(
                "there is something already",
                where=str(folder),
                fix="name another folder with --to, or take that one away",
            )
        self.folder = folder.with_name(f"{folder.name}.unfinished")
        # An empty one may be of a start that was killed before it had its lock.
        if (
            self.folder.exists()
            and any(self.folder.iterdir())
            and not (self.folder / _LOCK).exists()
        ):
            raise DataError(
                "the folder for unfinished work is there and is not of this command",
                where=str(self.folder),
                fix="take it away, or name another folder with --to",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / _LOCK).open("w")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataError(
                "another process is writing this folder",
                where=str(self.folder),
                fix="wait for it, or name another folder with --to",
            ) from error
        found = State.read(self.folder / _STATE)
        if found is not None and found.key == key:
            self._take_back(found)
        self.resumed = found is not None and found.key == key and self._has(found)
        self.state = found if found is not None and self.resumed else State(key)
        begun = [f"{self._name}.tmp"] if self.state.open else []
        for path in self.folder.iterdir():
            mine = (_LOCK, _STATE, *self.state.parts, *begun, *(own if self.resumed else ()))
            if path.name not in mine:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._part: Any = None
        self._size = self.state.open
        if begun:
            self._part = (self.folder / begun[0]).open("ab")
            self._part.truncate(self.state.open)
        self._noted = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the files; what is unfinished stays for the next start.

        Raises:
            Interrupted: in the place of a KeyboardInterrupt, to say where the next start goes on.
        """
        if self._part:
            self._part.close()
        self._lock.close()
        if kind is KeyboardInterrupt and (self.folder / _STATE).exists():
            raise Interrupted(
                "interrupted",
                where=str(self.folder),
                fix="the same command goes on from there",
            )

    @property
    def note(self) -> str | None:
        """Say what is continued; None where the command begins."""
        if not self.resumed or not self.state.rows:
            return None
        return f"goes on after {counted(self.state.rows, 'row')}, found in {self.folder}"

    def write(self, line: bytes) -> None:
        """Write a line, which ends with its LF, into the part.

        Raises:
            DataError: it cannot be written.
        """
        try:
            if self._part is None:
                self._part = (self.folder / f"{self._name}.tmp").open("wb")
            self._part.write(line)
        except OSError as error:
            raise self._unwritable(error) from error
        self._size += len(line)

    def dealt_with(self, rows: int = 1) -> None:
        """Count rows of the input as done, whatever became of them; a full part gets its name."""
        self.state.rows += rows
        if self._size >= PART:
            self.close_part()
        elif time.monotonic() - self._noted >= NOTED:
            self.note_progress()

    def commit(self, *names: str) -> None:
        """Note files that the command has written whole into :attr:`folder` as parts.

        Raises:
            DataError: it cannot be noted.
        """
        self.state.parts += names
        self.close_part()

    def close_part(self) -> None:
        """Give the part its name, and note how far the work is.

        Raises:
            DataError: it cannot be written.
        """
        try:
            if self._part is not None:
                self._part.close()
                (self.folder / f"{self._name}.tmp").replace(self.folder / self._name)
                self.state.parts.append(self._name)
                self._part, self._size = None, 0
        except OSError as error:
            raise self._unwritable(error) from error
        self.note_progress()

    def note_progress(self) -> None:
        """Note how far the work is, in the middle of a part.

        Raises:
            DataError: it cannot be written.
        """
        try:
            if self._part is not None:
                self._part.flush()
            self.state.open = self._size
            replace_file(self.folder / _STATE, self.state.data())
        except OSError as error:
            raise self._unwritable(error) from error
        self._noted = time.monotonic()

    def save_array(self, name: str, array: np.ndarray) -> None:
        """Write an array that the command keeps until it is finished; readers see all of it or nothing.

        Raises:
            DataError: it cannot be written.
        """
        data = BytesIO()
        np.save(data, array, allow_pickle=False)
        with self.writing():
            replace_file(self.folder / name, data.getvalue())

    def load_array(self, name: str) -> np.ndarray:
        """Read an array that :meth:`save_array` wrote."""
        return np.load(self.folder / name, allow_pickle=False)

    def finish(self, report: Mapping[str, Any], page: str | None = None) -> None:
        """Write the report and give the folder its name.

        Args:
            report: becomes report.json.
            page: becomes report.htm.

        Raises:
            DataError: it cannot be written.
        """
        self.close_part()
        try:
            text = json.dumps(report, indent=2, ensure_ascii=False)
            (self.folder / REPORT).write_text(text + "\n", "utf-8")
            if page:
                (self.folder / _PAGE).write_text(page, "utf-8", "xmlcharrefreplace")
            # The state first: without it the next start begins anew, and misses no file that it names.
            for name in (_STATE, *self._own):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                self.to.rmdir()  # empty
            self.folder.rename(self.to)
            (self.to / _LOCK).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Word an OSError inside as one of the folder, for a command that writes files of its own.

        Raises:
            DataError: one of them cannot be written.
        """
        try:
            yield
        except OSError as error:
            raise self._unwritable(error) from error

    def _take_back(self, state: State) -> None:
        """Take the name of a part away that an earlier start gave it and had no time to note."""
        named = self.folder / _part_name(state)
        begun = named.with_name(f"{named.name}.tmp")
        if state.open and named.is_file() and not begun.exists():
            named.rename(begun)

    def _has(self, state: State) -> bool:
        """Tell whether the files are there that an earlier start noted, and as long as it noted."""
        whole = all((self.folder / name).is_file() for name in state.parts)
        begun = self.folder / f"{_part_name(state)}.tmp"
        return whole and (
            not state.open or (begun.is_file() and begun.stat().st_size >= state.open)
        )

    @property
    def _name(self) -> str:
        return _part_name(self.state)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"the folder cannot be written: {error.strerror or error}",
            where=str(self.folder),
            fix="make room there, or name another folder with --to",
        )


def _part_name(state: State) -> str:
    return f"part-{len(state.parts):05d}.jsonl"
