"""Forged run folders, data and settings, and the program's expected reaction to each."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core.checkpoint import layout

__all__ = ["MARKER", "READERS", "Case", "cases"]

MARKER = "code-was-run"
"""A file created by the code of a hostile folder."""

READERS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "o", "--data", "text.txt"),
    "generate": ("generate", "o", "x", "--max-tokens", "3"),
    "report": ("report", "o", "--no-sample"),
    "export": ("export", "o", "--to", "model"),
    "resume": ("train", "--resume", "--out", "o", "--steps", "28"),
    "plan": ("plan", "--resume", "--out", "o"),
}
EVIL = f"""
from pathlib import Path
Path({MARKER!r}).touch()
from minillm_core import Plugin
class Evil(Plugin, api=1): ...
"""
REFUSED = frozenset({2})
DONE = frozenset({0})
EITHER = REFUSED | DONE


@dataclass(frozen=True)
class Case:
    """One command on invalid input.

    Attributes:
        row: of the table.
        name: a description of the case.
        arguments: of ``minillm``, in a folder with a run ``o`` and a text.
        spoil: changes that folder.
        codes: allowed exit codes.
        says: a pattern that the output must contain.
    """

    row: str
    name: str
    arguments: tuple[str, ...]
    spoil: Callable[[Path], None]
    codes: frozenset[int] = REFUSED
    says: str = ""


def cases(rng: random.Random, flips: int) -> Iterator[Case]:
    """List all cases, and ``flips`` more with one bit of run.json flipped."""
    yield from _code()
    yield from _kinds()
    yield from _tokenizers()
    yield from _settings()
    yield from _outside()
    yield from _commands()
    for _ in range(flips):
        number = rng.getrandbits(32)
        yield Case(
            "one bit of run.json flipped",
            f"bit {number} modulo its size",
            READERS["eval"],
            lambda place, number=number: _flip(place / "o" / "run.json", number),
            EITHER,
        )


def _code() -> Iterator[Case]:
    keys = ("./o/evil.py:Evil", "{here}/o/evil.py:Evil", "o/../o/evil.py:Evil", "o.evil:Evil")
    for key in (*keys, "./o/evil.py", "evil"):
        for reader, arguments in READERS.items():

            def spoil(place: Path, key: str = key) -> None:
                (place / "o" / "evil.py").write_text(EVIL)
                (place / "evil.py").write_text(EVIL)

                def change(record: dict[str, Any]) -> None:
                    name = key.replace("{here}", str(place))
                    record["config"]["plugins"] = {name: {"origin": "x", "options": {}}}
                    record["plan"]["data"] |= {"fields": ["x"], "on_batch": []}

                _record(place, change)

            # the page of a record is still drawn: nothing of it is loaded
            codes = EITHER if reader == "report" else REFUSED
            yield Case("a run.json that names code", f"{reader}, {key}", arguments, spoil, codes)


def _kinds() -> Iterator[Case]:
    for name in ("run.json", "metrics.jsonl", "tokenizer.json", "lock.json", "checkpoints"):
        readers = set(READERS)
        if name in ("metrics.jsonl", "lock.json", "checkpoints"):
            readers = {"resume"} | ({"report"} if name == "metrics.jsonl" else set())
        if name == "tokenizer.json":
            readers -= {"report", "plan"}
        for kind, make in KINDS.items():
            if (name, kind) == ("checkpoints", "folder"):
                continue
            for reader in sorted(readers):
                yield Case(
                    "a file of a run: link, pipe, device, hole, folder, garbage",
                    f"{reader}, {name} is a {kind}",
                    READERS[reader],
                    lambda place, name=name, make=make: _put(place, name, make),
                    # a resume rewrites a tokenizer, and garbage in metrics.jsonl counts as truncated
                    _codes(name, kind, reader),
                    re.escape(name) if _codes(name, kind, reader) == REFUSED else "",
                )


def _codes(name: str, kind: str, reader: str) -> frozenset[int]:
    if (name, kind) == ("lock.json", "hole of 10 GB"):
        return DONE  # it is emptied, and takes no space before either
    harmless = {"metrics.jsonl", "tokenizer.json", "lock.json"}
    if kind in ("garbage", "deep JSON") and name in harmless and reader in ("resume", "report"):
        return DONE
    return REFUSED


def _pipe(path: Path, beside: Path) -> None:
    os.mkfifo(path)


def _hole(path: Path, beside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "folder": lambda path, beside: path.mkdir(),
    "link": lambda path, beside: path.symlink_to(beside),
    "link to itself": lambda path, beside: path.symlink_to(path),
    "link to a device": lambda path, beside: path.symlink_to("/dev/zero"),
    "pipe": _pipe,
    "hole of 10 GB": _hole,
    "garbage": lambda path, beside: path.write_bytes(b"\xff\xfe" * 5000) and None,
    "deep JSON": lambda path, beside: path.write_text('{"a":' * 100_000) and None,
}


def _tokenizers() -> Iterator[Case]:
    def swapped(document: dict[str, Any]) -> None:
        vocab = document["model"]["vocab"]
        a, b = list(vocab)[40:42]
        vocab[a], vocab[b] = vocab[b], vocab[a]

    def exploding(document: dict[str, Any]) -> None:
        pattern = {"Regex": "."}
        document["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "x" * 1000}

    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "two ids exchanged": swapped,
        "a normalizer": lambda document: document.update(normalizer={"type": "Lowercase"}),
        "another pre_tokenizer": lambda document: document.update(
            pre_tokenizer={"type": "Whitespace"}
        ),
        "one that makes text a thousand times as long": exploding,
    }
    for what, change in changes.items():
        for reader in ("eval", "generate", "export"):

            def spoil(place: Path, change: Callable[[dict[str, Any]], None] = change) -> None:
                path = place / "o" / "tokenizer.json"
                document = json.loads(path.read_text("utf-8"))
                change(document)
                path.write_text(json.dumps(document), "utf-8")

            row = "another tokenizer.json than the run's, or none"
            yield Case(row, f"{reader}, {what}", READERS[reader], spoil, says="tokenizer")
    for reader in ("eval", "generate", "export"):
        yield Case(
            "another tokenizer.json than the run's, or none",
            f"{reader}, missing",
            READERS[reader],
            lambda place: (place / "o" / "tokenizer.json").unlink(),
            says="tokenizer.json is missing",
        )


def _settings() -> Iterator[Case]:
    row = "settings of run.json changed"
    for section, key, value in (
        ("model", "tied", True),
        ("model", "rope_base", 500_000.0),
        ("train", "seq_len", 16),
    ):
        for reader in ("eval", "generate", "export", "resume"):

            def change(record: dict[str, Any], at: tuple[str, str, Any] = (section, key, value)):
                record["config"][at[0]][at[1]]["value"] = at[2]

            yield Case(
                row,
                f"{reader}, {section}.{key}",
                READERS[reader],
                lambda place, change=change: _record(place, change),
                says=rf"{section}\.{key}|{key}",
            )
    for reader in ("eval", "resume"):
        yield Case(
            row,
            f"{reader}, seed",
            READERS[reader],
            lambda place: _record(place, lambda r: r["config"]["seed"].update(value=5)),
            says="seed",
        )


def _outside() -> Iterator[Case]:
    row = "what would write outside of the run's folder"

    def lock(place: Path) -> None:
        (place / "o" / "lock.json").hardlink_to(place / "outside" / "precious")

    def checkpoints(place: Path) -> None:
        other = place / "outside" / "checkpoints"
        shutil.move(place / "o" / "checkpoints", other)
        (other / "step-00000001.tmp-0123456789abcdef").mkdir()
        (place / "o" / "checkpoints").symlink_to(other)

    def metrics(place: Path) -> None:
        (place / "o" / "metrics.jsonl").unlink()
        (place / "o" / "metrics.jsonl").symlink_to(place / "outside" / "precious")

    resume = READERS["resume"]
    yield Case(row, "lock.json is a hard link", resume, lock, says="hard link")
    yield Case(row, "checkpoints is a link", resume, checkpoints, says="is a link")
    yield Case(row, "metrics.jsonl is a link", resume, metrics, says="is a link")
    for folder in ("../outside", "{here}/outside"):

        def tracked(place: Path, folder: str = folder) -> None:
            options = {"folder": {"value": folder.replace("{here}", str(place)), "origin": "x"}}

            def change(record: dict[str, Any]) -> None:
                record["config"]["plugins"] = {"tensorboard": {"origin": "x", "options": options}}

            _record(place, change)

        yield Case(row, f"tensorboard.folder={folder}", resume, tracked, says="tensorboard")

    def online(record: dict[str, Any]) -> None:
        options = {"mode": {"value": "online", "origin": "x"}}
        record["config"]["plugins"] = {"wandb": {"origin": "x", "options": options}}

    yield Case(row, "wandb.mode=online", resume, lambda p: _record(p, online), says="wandb")


def _commands() -> Iterator[Case]:
    """Build settings, and names of files, that are not defects of the program."""
    row = "settings and data that cannot be used"
    tiny = ("train", "--preset", "tiny", "--steps", "2", "--out", "n", "model.dim=64")
    text = ("--data", "text.txt")

    def nothing(place: Path) -> None: ...

    def named(place: Path) -> None:
        shutil.copy(place / "text.txt", os.fsencode(place) + b"/text-\xff.txt")

    yield Case(row, "init=5", (*tiny, *text, "init=5"), nothing, says="init")
    yield Case(row, "10^12 rows", (*tiny, *text, f"train.rows={10**12}"), nothing, REFUSED | {6})
    name = os.fsdecode(b"text-\xff.txt")
    yield Case(row, "a path that is not UTF-8", (*tiny, "--data", name), named, EITHER)


def _record(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = place / "o" / "run.json"
    record = json.loads(path.read_text("utf-8"))
    change(record)
    path.write_text(json.dumps(record), "utf-8")


def _put(place: Path, name: str, make: Callable[[Path, Path], None]) -> None:
    path, beside = place / "o" / name, place / "outside" / name
    if path.is_dir():
        shutil.move(path, beside)
        (beside / f"{layout.folder(place, 1).name}.tmp-0123456789abcdef").mkdir()
    elif path.exists():
        path.rename(beside)
    else:
        beside.write_text("{}")
    make(path, beside)


def _flip(path: Path, number: int) -> None:
    data = bytearray(path.read_bytes())
    bit = number % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))
