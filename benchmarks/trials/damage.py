"""Ways to damage a checkpoint, each at a random place of a random file.

A checkpoint's files may be hard links to a valid one's: changed files are rewritten.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from minillm_core.checkpoint import layout

__all__ = ["KINDS", "link"]

PAGE = 4096
FILES = (*layout.FILES, layout.MANIFEST)

Damage = Callable[[Path, Path, random.Random], str]
"""``damage(checkpoint, an older one, rng)`` -> a description of the damage."""


def link(source: Path, target: Path) -> None:
    """Copy a folder by hard links."""
    shutil.copytree(source, target, copy_function=lambda a, b: Path(b).hardlink_to(a))


def truncate(bad: Path, older: Path, rng: random.Random) -> str:
    """Truncate a file at a random byte."""
    path = bad / rng.choice(FILES)
    data = path.read_bytes()
    length = rng.randrange(len(data))
    _rewrite(path, data[:length])
    return f"{path.name} cut off at byte {length:,} of {len(data):,}"


def flip(bad: Path, older: Path, rng: random.Random) -> str:
    """Flip one bit."""
    path = bad / rng.choice(FILES)
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    _rewrite(path, bytes(data))
    return f"{path.name}: bit {bit:,} flipped"


def zero(bad: Path, older: Path, rng: random.Random) -> str:
    """Overwrite a page that was not empty with zeros."""
    while True:
        path = bad / rng.choice(FILES)
        data = bytearray(path.read_bytes())
        at = PAGE * rng.randrange((len(data) + PAGE - 1) // PAGE)
        if any(data[at : at + PAGE]):
            break
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
    _rewrite(path, bytes(data))
    return f"{path.name}: zeros from byte {at:,}"


def delete(bad: Path, older: Path, rng: random.Random) -> str:
    """Remove a file."""
    path = bad / rng.choice(FILES)
    path.unlink()
    return f"{path.name} removed"


def swap_between(bad: Path, older: Path, rng: random.Random) -> str:
    """Exchange a file with the same one of an older checkpoint: both are damaged then."""
    name = rng.choice(FILES)
    _exchange(bad / name, older / name)
    return f"{name} exchanged with {older.name}"


def swap_within(bad: Path, older: Path, rng: random.Random) -> str:
    """Exchange two files of one checkpoint."""
    a, b = rng.sample(FILES, 2)
    _exchange(bad / a, bad / b)
    return f"{a} and {b} exchanged"


def stale(bad: Path, older: Path, rng: random.Random) -> str:
    """Replace a file, every other time the manifest, by an older checkpoint's."""
    name = layout.MANIFEST if rng.random() < 0.5 else rng.choice(layout.FILES)
    _rewrite(bad / name, (older / name).read_bytes())
    return f"{name} of {older.name} in its place"


def pose(bad: Path, older: Path, rng: random.Random) -> str:
    """Replace a whole checkpoint by an older one under the same name."""
    shutil.rmtree(bad)
    link(older, bad)
    return f"{older.name} under the name {bad.name}"


KINDS: dict[str, Damage] = {
    "cut off at a random byte": truncate,
    "one bit flipped": flip,
    "a page zeroed": zero,
    "a file removed": delete,
    "files of two checkpoints exchanged": swap_between,
    "two files of one exchanged": swap_within,
    "an older file in its place": stale,
    "an older checkpoint under its name": pose,
}


def _rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _exchange(a: Path, b: Path) -> None:
    middle = a.with_name("middle")
    a.rename(middle)
    b.rename(a)
    middle.rename(b)
