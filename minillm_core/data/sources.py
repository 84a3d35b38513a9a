"""The files of the data: discovered, sorted, and identified by their content.

A folder is read recursively, its files in the order of their relative paths; hidden files and folders and
files of other suffixes are left out, and so are the folders of runs, with a note of their number. A file
that is named itself is read as text if its suffix is unknown, and as JSON lines if it is .json; tables,
archives and the like are refused.
Without any path, the data are the sources of the running Python's standard library, without its tests and
its tables.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from minillm_core.config.schema import weighted_path
from minillm_core.data import formats
from minillm_core.errors import DataError
from minillm_core.install import pip_line
from minillm_core.text import are, counted

_TABLES = (".csv", ".tsv")
_FOREIGN = {".bz2", ".zip", ".7z", ".tar", ".tgz", ".parquet", ".arrow", ".pdf", ".docx", *_TABLES}
_FIXES: dict[str, str] = dict.fromkeys(
    (".parquet", ".arrow"), pip_line("minillm-data[parquet]") + " reads it"
)
_FIXES |= dict.fromkeys(_TABLES, 'write its text as .txt, or as JSON lines, {"text": "..."}')
_BROKEN, _RUN = "broken link", "run folder"
_OF_RUN = {"run.json", "run.toml", "metrics.jsonl", "tokenizer.json", "report.html", "checkpoints"}
UNPACKED = {".gz": 3, ".xz": 4, ".zst": 3.5}
"""Approximate bytes of text per byte of a compressed file."""

# Tests, installed packages, and tables of characters and help texts: a model trained on those writes
# tables (docs/experiments.md).
_NOT_LIBRARY = {
    *("encodings", "pydoc_data", "lib2to3", "test", "tests", "idle_test"),
    *("site-packages", "dist-packages", "__pycache__"),
}


@dataclass(frozen=True)
class Source:
    """A source file.

    Attributes:
        path: the file.
        format: its format.
        packing: ".gz", ".xz" or empty.
        size: bytes on disk.
        modified: its modification time, in nanoseconds.
        given: index of the path that it was found under.
    """

    path: Path
    format: formats.Format
    packing: str
    size: int
    modified: int
    given: int = 0

    @property
    def unpacked(self) -> int:
        """The size of the decompressed file in bytes, estimated if it is compressed."""
        text = self.format.text
        return text(self.path) if text else int(self.size * UNPACKED.get(self.packing, 1))

    def digest(self, tick: Callable[[int], None] = lambda count: None) -> str:
        """Return the digest of the file's bytes and its format; it does not depend on its name or time.

        Args:
            tick: called with each number of bytes read.

        Raises:
            DataError: it cannot be read.
        """
        content = xxhash.xxh3_128(f"{self.format.name}{self.packing}\n".encode())
        try:
            with self.path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    content.update(chunk)
                    tick(len(chunk))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return content.hexdigest()

    def check_unchanged(self) -> None:
        """Compare size and time with those when the file was found.

        Raises:
            DataError: they differ: the content read may mix two versions.
        """
        now = _regular(self.path)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.modified):
            what = "the file changed while it was read"
            raise DataError(what, where=str(self.path), fix="start again when nothing writes to it")


def find(paths: Sequence[str], say: Callable[[str], None]) -> list[Source]:
    """Find the files of ``paths``, in the order given, folders sorted; no paths: the standard library.

    Args:
        paths: files or folders.
        say: prints a line about the files of a folder that are left out.

    Raises:
        DataError: a path is empty, does not exist, is not a file or folder, or a folder holds no data.
    """
    if not paths:
        return _library()
    if not all(paths):  # an empty path, from an unset shell variable, would be the current folder
        raise DataError("a path of the data is empty", where="''", fix="name a file, or .")
    for path in paths:
        try:
            path.encode("utf-8")
        except UnicodeEncodeError as error:
            what = "the path is not UTF-8, and a run records its paths as such"
            fix = "rename it, or name the folder that it is in"
            raise DataError(what, where=ascii(path), fix=fix) from error
    known = formats.Formats()
    return [
        replace(one, given=number)
        for number, path in enumerate(paths)
        for one in _expand(Path(path).expanduser(), known, say)
    ]


def check_weighted(paths: Sequence[str]) -> None:
    """Refuse a missing path whose end was read as its weight.

    Raises:
        DataError: there is none of its name without the weight, or it is empty.
    """
    for text in paths:
        path, weight = weighted_path(text)
        if weight is not None and not (path and os.path.lexists(Path(path).expanduser())):
            raise DataError(
                "there is no such file or folder",
                where=f"{path or 'an empty path'} ({text[len(path) :]} was read as its weight)",
                fix=f"check the path; if the name ends so, add a weight to it: {text}:1",
            )


def resolved(sources: Sequence[Source]) -> Counter[str]:
    """Count the files by their resolved paths."""
    return Counter(os.path.realpath(one.path) for one in sources)


def _expand(path: Path, known: formats.Formats, say: Callable[[str], None]) -> list[Source]:
    if not os.path.isdir(path):  # False, where Path.is_dir raises: a whole text given as a path
        format, packing = _kind(path, known)
        suffix = (path.with_suffix("") if packing else path).suffix
        if format is None and suffix.lower() in {*_FOREIGN, ".bin"}:  # shards are mapped
            advice = "unpack or convert it to text or JSON lines, plain or under .gz, .xz or .zst"
            what = f"{suffix}{packing} files are not read"
            raise DataError(what, where=str(path), fix=_FIXES.get(suffix.lower(), advice))
        other = formats.JSONL if suffix.lower() == ".json" else formats.TEXT
        return [_source(path, format or other, packing)]
    found, skipped = [], Counter[str]()
    for file in _walk(path, lambda name: name.startswith(".")):
        format, packing = _kind(file, known)
        if file.name.startswith("."):
            skipped["hidden"] += 1
        elif _is_broken(file):
            skipped[_BROKEN] += 1
        elif file.is_dir():
            skipped["linked folder" if file.is_symlink() else _RUN] += 1
        elif format is None:
            skipped[file.suffix or "no suffix"] += 1
        else:
            found.append(_source(file, format, packing))
    listed = _listed(skipped)
    if not found:
        raise DataError(
            "the folder holds no text" + (f", only {listed}" if skipped else ""),
            where=str(path),
            fix=f"it needs files like {', '.join(list(formats.FORMATS)[:6])}, .jsonl, plain or under .gz, "
            ".xz or .zst, or token shards (.bin); a file of another suffix can be named itself",
        )
    if skipped:
        read, left = counted(len(found), "file"), skipped.total()
        say(f"{path}: {are(read, len(found))} read, {are(f'{left:,}', left)} not: {listed}")
    return found


def _is_broken(path: Path) -> bool:
    """Return whether a path is a link whose target is missing or cannot be reached."""
    return os.path.islink(path) and not os.path.exists(path)


def _library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in _walk(root, _NOT_LIBRARY.__contains__) if f.suffix == ".py"]
    if not files:
        what = "this Python comes without the sources of its standard library"
        raise DataError(what, where=str(root), fix="name text to train on: --data PATH")
    return [_source(file, formats.TEXT, "") for file in files]


def _walk(root: Path, left_out: Callable[[str], bool]) -> Iterator[Path]:
    """Yield files below a folder, sorted by their relative paths; links to folders are not followed.

    In the place of a run's files, whose log would be read as text, its folder is yielded.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        inside, own = Path(folder), set[str]()
        if {"run.json", "run.toml"} <= {*files}:
            found.append(inside)
            # beside the files of a run in the root there may be data
            own = _OF_RUN if inside == root else {*folders, *files}
        folders[:] = [name for name in folders if not (name in own or left_out(name))]
        found += [inside / name for name in files if name not in own]
        found += [inside / name for name in folders if os.path.islink(inside / name)]
    return iter(sorted(found, key=lambda path: path.relative_to(root).parts))


def _kind(path: Path, known: formats.Formats) -> tuple[formats.Format | None, str]:
    packing = path.suffix.lower() if path.suffix.lower() in formats.PACKINGS else ""
    format = known.of((path.with_suffix("") if packing else path).name)
    if packing and format is formats.SHARD:
        return None, packing  # shards are mapped, so they cannot be compressed
    return format, packing


def _source(path: Path, format: formats.Format, packing: str) -> Source:
    found = _regular(path)
    return Source(path, format, packing, found.st_size, found.st_mtime_ns)


def _regular(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        fix = "write a pipe's or device's content into a file first: it is read more than once"
        raise DataError("neither a file nor a folder", where=str(path), fix=fix)
    return found


def _unreadable(path: Path, error: OSError) -> DataError:
    if _is_broken(path):
        what = f"a broken link: its target, {os.readlink(path)}, is not there or cannot be reached"
        return DataError(what, where=str(path), fix="put the target back, or name another path")
    if not isinstance(error, FileNotFoundError):
        what = f"cannot be read: {error.strerror}"
        return DataError(what, where=str(path), fix="check its permissions")
    # a resumed run may have been started in another folder
    place = str(path) if path.is_absolute() else f"{path}, seen from {Path.cwd()}"
    fix = "check the path; if the text was moved, give its new path as the data"
    return DataError("there is no such file or folder", where=place, fix=fix)


def _listed(skipped: Counter[str]) -> str:
    names = [f"{n} {k}{'s' * (k in (_BROKEN, _RUN) and n > 1)}" for k, n in skipped.most_common(4)]
    rest = len(skipped) - len(names)
    return ", ".join(names) + (f" and {rest} other suffixes" if rest else "")


TEXT_PER_ENTRY = 800
"""Fewest bytes of text per vocabulary entry: on 1.1 MB of Shakespeare 1,024 entries reach 2.21 bits/byte
and 4,096 reach 2.38 in the same minutes; on 8 MB of Python 4,096 beat 2,048 (docs/experiments.md)."""

SMALLEST = 512
"""Smallest vocabulary that the rule chooses."""


def fitting_entries(sources: Sequence[Source], entries: int) -> int:
    """Return ``entries``, or for a small text a power of two: one entry for each 800 bytes of text.

    It uses file sizes, so nothing is read but the first line of JSON lines.

    Args:
        sources: from :func:`find`.
        entries: the preset's vocabulary size.

    Returns:
        The vocabulary size, at least 512; ``entries`` also if the data are token ids, which have
        their own tokenizer.
    """
    if any(_holds_ids(source) for source in sources):
        return entries
    enough = max(sum(source.unpacked for source in sources) // TEXT_PER_ENTRY, SMALLEST)
    return entries if entries <= enough else min(entries, 1 << enough.bit_length() - 1)


def stated_end_of_text(sources: Sequence[Source]) -> int:
    """Return the id that begins documents of ids, as the first file that states one has it; else 0."""
    return next(filter(None, (one.format.end_of_text(one.path) for one in sources)), 0)


def _holds_ids(source: Source) -> bool:
    """Return whether a file holds token ids: a shard, or JSON lines that begin with them."""
    if source.format is not formats.JSONL:
        return source.format is formats.SHARD
    try:
        with formats.opened(source.path, source.packing, formats.Reading(vocab=2)) as file:
            return b'"ids"' in file.readline(1 << 16)
    except DataError:  # the read that follows raises it with its details
        return False
