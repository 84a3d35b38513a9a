"""The output folder of a command: written atomically, and resumable after a kill.

While a command runs, its folder is ``NAME.unfinished`` beside the final one. Each part in it is renamed
to its name when it is complete, and ``progress.json`` records the input row at that point, or the part's
length after a later row; the next start of the same command on the same files resumes there. The last
step is one rename of the folder.
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
"""Approximate bytes of a part."""

NOTED = 10.0
"""Seconds between two progress records: the most work that an interruption loses."""

_STATE, _LOCK, REPORT = "progress.json", ".lock", "report.json"
_PAGE = "report.htm"  # not .html: the .html files of a data folder are training text


def key_of(command: str, sources: list[Source], **arguments: Any) -> str:
    """Compute a digest of the result's inputs: the command, its arguments, and each file's path, size and time."""
    files = [[str(one.path.resolve()), one.size, one.modified] for one in sources]
    told = json.dumps([command, files, arguments], sort_keys=True, default=str)
    return xxhash.xxh3_128(told.encode()).hexdigest()


def check_outside(folder: Path, paths: Sequence[str | Path]) -> None:
    """Check that an output folder is not inside an input folder.

    Raises:
        DataError: it is; the next start would read the output as input.
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
    """The recorded state of an unfinished folder.

    Attributes:
        key: of the command, see :func:`key_of`.
        rows: number of processed input rows.
        parts: names of the complete parts, in order.
        open: bytes of the current part.
        counts: of rows, by outcome.
        more: the command's own state, as JSON.
    """

    key: str
    rows: int = 0
    parts: list[str] = field(default_factory=list)
    open: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    more: dict[str, Any] = field(default_factory=dict)

    def data(self) -> bytes:
        """Serialise the state as JSON."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a state; None if it is missing or unreadable."""
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "counts": Counter(found["counts"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Output:
    """A writer of a folder of JSON lines; a context manager.

    ::

        with Output(to, key_of("filter", rows.sources, rules=rules)) as output:
            for row in islice(rows, output.state.rows, None):
                output.state.counts["kept"] += 1
                output.write(row.line)
                output.dealt_with()
            output.finish({"command": "filter", ...})

    Args:
        folder: the final folder; must not exist, or be empty.
        key: of the command.
        own: names of the command's temporary files in the folder.

    Attributes:
        state: the state of an earlier start of the same command, or a new one.
        folder: the unfinished folder, written to until :meth:`finish`.

    Raises:
        DataError: the folder exists, cannot be created, or is being written by another process.
    """

    def __init__(self, folder: Path, key: str, own: tuple[str, ...] = ()) -> None:
        self.to, self._own = folder, own
        if folder.resolve() == Path.cwd():
            raise DataError(
                "the output is written whole, and cannot replace the current folder",
                where=str(folder),
                fix="name a new folder with --to",
            )
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise DataError(
                "there is something already",
                where=str(folder),
                fix="name another folder with --to, or take that one away",
            )
        self.folder = folder.with_name(f"{folder.name}.unfinished")
        # An empty folder may be left by a start that was killed before it created its lock.
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
        """Close the files, keeping unfinished ones for the next start.

        Raises:
            Interrupted: replaces a KeyboardInterrupt, with the row at which the next start resumes.
        """
        if self._part:
            self._part.close()
        self._lock.close()
        if kind is KeyboardInterrupt and (self.folder / _STATE).exists():
            raise Interrupted(
                "interrupted",
                where=str(self.folder),
                fix="the same command continues from there",
            )

    @property
    def note(self) -> str | None:
        """Describe what is resumed; None for a new start."""
        if not self.resumed or not self.state.rows:
            return None
        return f"continues after {counted(self.state.rows, 'row')}, found in {self.folder}"

    def write(self, line: bytes) -> None:
        """Write a line, including its LF, to the current part.

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
        """Count input rows as processed, whatever their outcome; close a full part."""
        self.state.rows += rows
        if self._size >= PART:
            self.close_part()
        elif time.monotonic() - self._noted >= NOTED:
            self.note_progress()

    def commit(self, *names: str) -> None:
        """Record files that the command has completely written into :attr:`folder` as parts.

        Raises:
            DataError: the record cannot be written.
        """
        self.state.parts += names
        self.close_part()

    def close_part(self) -> None:
        """Rename the complete part to its name, and record the progress.

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
        """Record the progress in the middle of a part.

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
        """Write a temporary array of the command atomically.

        Raises:
            DataError: it cannot be written.
        """
        data = BytesIO()
        np.save(data, array, allow_pickle=False)
        with self.writing():
            replace_file(self.folder / name, data.getvalue())

    def load_array(self, name: str) -> np.ndarray:
        """Read an array written by :meth:`save_array`."""
        return np.load(self.folder / name, allow_pickle=False)

    def finish(self, report: Mapping[str, Any], page: str | None = None) -> None:
        """Write the report and rename the folder to its final name.

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
            # Remove the state first: without it the next start begins anew, and needs no file it names.
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
        """Convert an OSError inside into a DataError of the folder, for commands that write their own files.

        Raises:
            DataError: one of them cannot be written.
        """
        try:
            yield
        except OSError as error:
            raise self._unwritable(error) from error

    def _take_back(self, state: State) -> None:
        """Undo the rename of a part that an earlier start had no time to record."""
        named = self.folder / _part_name(state)
        begun = named.with_name(f"{named.name}.tmp")
        if state.open and named.is_file() and not begun.exists():
            named.rename(begun)

    def _has(self, state: State) -> bool:
        """Return whether the files recorded by an earlier start exist with their recorded sizes."""
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
