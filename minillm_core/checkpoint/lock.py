"""One trainer per folder: OUT/lock.json is locked by the kernel, and names who holds it.

The kernel's lock (``flock``) decides: it is gone the moment its process is, however that died, and
a number that another process got since means nothing to it. The file's content is for people.

Some file systems have no ``flock``. There the content decides: the file belongs to whoever made it
(``O_EXCL``), until that process is dead. Only its own host can tell; another host's is refused.

    free      -> made by us                                    ours
    there     -> flock                                         ours, or refused
              -> no flock, its owner is dead                   replaced by a rename, ours
              -> no flock, anything else                       refused
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minillm_core.checkpoint.owner import Owner
from minillm_core.errors import Refusal

__all__ = ["LOCK", "lock"]

LOCK = "lock.json"
TRIES = 1000  # each one but the last means that somebody let go of the folder meanwhile
PATIENCE = 0.5  # seconds that an owner has to write its name after making the file
LARGEST = 1 << 12  # bytes of a lock.json that are looked at
FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


@contextmanager
def lock(out: Path, say: Callable[[str], None] | None = None) -> Iterator[Owner]:
    """Take a run's folder for this process; inside the block nobody else trains there.

    A forked child neither holds the lock nor gives it back.

    Args:
        out: the run's folder, which exists.
        say: is told where the file system cannot lock, and what that means.

    Raises:
        Refusal: somebody else trains there, or nothing can be written; nothing was changed.
    """
    path = out / LOCK
    handle, by_kernel, owner = _take(path)
    if say and not by_kernel:
        say(
            f"the file system of {out} cannot lock files: {LOCK} is trusted instead, and after a "
            "crash on another host a person has to delete it"
        )
    held = [handle]

    def forget() -> None:  # the kernel's lock lasts as long as any process has the descriptor
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=forget)
    try:
        yield owner
    finally:
        # The name goes first: whoever opened the file before finds out that it is not it any more.
        if held and _is_at(path, handle):
            path.unlink(missing_ok=True)
        forget()


def _take(path: Path) -> tuple[int, bool, Owner]:
    """(descriptor that is ours while it is open, whether the kernel locked it, we)."""
    owner = Owner.this()
    try:
        for _ in range(TRIES):
            handle, made = _open(path)
            if handle is None:
                continue
            taken = None
            try:
                locked = _flock(handle)
                if locked is None and not made:
                    taken = _take_over(path, handle, owner)
                elif locked is False:
                    raise _refused(path, _holder(handle), by_kernel=True)
                elif _is_at(path, handle):
                    taken = _sign(path, handle, owner)
            finally:
                if taken != handle:
                    os.close(handle)
            if taken is not None:
                return taken, locked is not None, owner
    except OSError as error:
        raise Refusal(
            f"{path.parent} cannot be locked: {error.strerror}",
            where=str(path),
            fix="make the folder writable, or give another --out",
        ) from error
    raise Refusal(f"{path} is made and removed all the time", where=str(path))


def _open(path: Path) -> tuple[int | None, bool]:
    """(descriptor, whether we made the file); None: it went away in between."""
    with suppress(FileExistsError):
        return os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o644), True
    try:
        handle = os.open(path, FLAGS)
    except FileNotFoundError:
        return None, False
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return handle, False


def _flock(handle: int) -> bool | None:
    """Whether the kernel gave us the file; None if it cannot."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return None
        raise
    return True


def _sign(path: Path, handle: int, owner: Owner) -> int:
    """Write our name into a file that is ours; returns its descriptor."""
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, owner.encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return handle


def _take_over(path: Path, handle: int, owner: Owner) -> int | None:
    """Replace a dead owner's file by ours in one step; None: look again, something moved.

    Two may find the same owner dead. Only one at a time has the claim, and looks again under it.
    """
    before = _holder(handle)
    if before is None or not before.here or before.alive():
        raise _refused(path, before, by_kernel=False)
    claim = path.with_name(f"{path.name}.takeover")
    try:
        claimed = os.open(claim, FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise _refused(claim, before, by_kernel=False) from None
    try:
        _sign(claim, claimed, owner)
        if _is_at(path, handle):
            claim.replace(path)
            return claimed
    except BaseException:
        os.close(claimed)
        claim.unlink(missing_ok=True)
        raise
    os.close(claimed)
    claim.unlink()
    return None


def _holder(handle: int) -> Owner | None:
    """Whom the file names; None if nobody within the time that it takes to write a name."""
    deadline = time.monotonic() + PATIENCE
    while True:
        owner = Owner.parse(os.pread(handle, LARGEST, 0))
        if owner or time.monotonic() > deadline:
            return owner
        time.sleep(PATIENCE / 20)


def _is_at(path: Path, handle: int) -> bool:
    """Whether ``path`` still names the file that we have open."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _refused(path: Path, owner: Owner | None, *, by_kernel: bool) -> Refusal:
    who = f"by {owner}" if owner else "by a process that left no name"
    fix = "wait until it has ended, or end it; or give another --out"
    if by_kernel and owner and owner.here and not owner.alive():
        who += ", which has ended; but a process that it started still holds the file"
        fix = f"end that one: `fuser -v {path}` shows it"
    elif not by_kernel and not (owner and owner.here and owner.alive()):
        fix = f"if you know that nobody uses it any more, delete {path}"
    return Refusal(f"{path.parent} is in use {who}", where=str(path), fix=fix)
