"""One trainer per folder: OUT/lock.json is locked by the kernel, and names its owner.

The kernel's lock (``flock``) decides: it ends with its process, however that died, and a process that
reuses the process number does not have it. The file's content is for people.

Some file systems have no ``flock``. There the content decides: the file belongs to the process that made it
(``O_EXCL``), until that process is dead. Only its own host can tell; another host's is refused.

    free      -> made by this process                          held
    there     -> flock                                         held, or refused
              -> no flock, its owner is dead                   replaced by a rename, held
              -> no flock, anything else                       refused
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minillm_core.errors import MinillmError, Refusal
from minillm_core.text import plain

TICK = 0.02  # seconds; process start times are counted in ticks of 1/100 s


class Owner(BaseModel):
    """A process on a host, as lock.json holds it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    host: str = Field(max_length=300)
    pid: int = Field(gt=0, lt=1 << 31)
    started: float = Field(allow_inf_nan=False)  # seconds since 1970
    uptime: float = Field(allow_inf_nan=False)  # the same in seconds since the host was started
    since: str = Field(max_length=40)  # when it took the folder

    @classmethod
    def this(cls) -> Owner:
        """Describe this process."""
        pid = os.getpid()
        started, uptime = _start(pid)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(host=socket.gethostname(), pid=pid, started=started, uptime=uptime, since=since)

    @classmethod
    def parse(cls, data: bytes) -> Owner | None:
        """Parse the owner named in lock.json; None if it names none."""
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def encode(self) -> bytes:
        """Encode the content of lock.json."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @property
    def here(self) -> bool:
        """Whether the process, running or ended, is of this host."""
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Return whether the process still runs; this can be determined only on its own host.

        A change of the system clock moves one of the two start times; which one depends on the system. A
        process that reuses the number matches neither.
        """
        import psutil

        try:
            if psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE:
                return False
            started, uptime = _start(self.pid)
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True  # it exists, but this account may not inspect it
        return abs(started - self.started) < TICK or abs(uptime - self.uptime) < TICK

    def __str__(self) -> str:
        return f"process {self.pid} on {plain(self.host, 80)} since {plain(self.since)}"


def _start(pid: int) -> tuple[float, float]:
    """Return the start time of a process: in seconds since 1970, and since the host was started."""
    import psutil

    started = psutil.Process(pid).create_time()
    return started, started - psutil.boot_time()


LOCK = "lock.json"
TRIES = 1000  # each but the last means that another process released the folder meanwhile
PATIENCE = 0.5  # seconds that an owner has to write its name after creating the file
LARGEST = 1 << 12  # most bytes of a lock.json to read
FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class RunLock:
    """A run's folder, held by this process."""

    out: Path
    owner: Owner
    handle: int  # open descriptor of its lock.json

    def is_ours(self) -> bool:
        """Return whether the path still leads to the locked folder, by its lock.json."""
        return _is_at(self.out / LOCK, self.handle)

    def check(self) -> None:
        """Refuse to write into another folder of that name, or where another process may train.

        Raises:
            MinillmError: the folder was deleted, moved or replaced, or its lock.json was.
        """
        if self.is_ours():
            return
        if self.out.is_dir():
            what = f"{self.out / LOCK} was removed or replaced while this run was training"
            fix = "do not touch that file while a run lasts; --resume continues from the last checkpoint"
        else:
            what = f"{self.out} was deleted or moved while this run was training"
            fix = "if it was moved, --resume --out with its new path continues from the last checkpoint"
        raise MinillmError(f"{what}: nothing more is written", where=str(self.out), fix=fix)


@contextmanager
def lock(out: Path, say: Callable[[str], None] | None = None) -> Iterator[RunLock]:
    """Lock a run's folder for this process; inside the block no other process trains there.

    A forked child neither holds nor releases the lock.

    Args:
        out: the run's folder, which exists.
        say: prints a note if the file system cannot lock files.

    Raises:
        Refusal: another process trains there, or the folder is not writable; nothing was changed.
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
        yield RunLock(out, owner, handle)
    finally:
        # Unlink first: a process that has the file open then detects that the name leads to another.
        if held and _is_at(path, handle):
            path.unlink(missing_ok=True)
        forget()


def _take(path: Path) -> tuple[int, bool, Owner]:
    """Take the lock; return (descriptor that holds it, whether the kernel locked it, this process)."""
    owner = Owner.this()
    try:
        for _ in range(TRIES):
            handle, made = _open(path)
            if handle is None:
                continue
            taken = None
            try:
                _check_file(handle)
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
        fix = "make the folder writable, or name another folder"
        if error.errno in (errno.EINVAL, errno.EMLINK, errno.ELOOP, errno.EISDIR):
            fix = f"delete {path}, which no run made"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "make room on its disk, or name a folder on another"
        what = f"{path.parent} cannot be locked: {error.strerror}"
        raise Refusal(what, where=str(path), fix=fix) from error
    raise Refusal(f"{path} is created and removed again and again", where=str(path))


def _open(path: Path) -> tuple[int | None, bool]:
    """Open or create the file; return (descriptor, whether it was created). None: it was deleted in between."""
    with suppress(FileExistsError):
        return os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o644), True
    with suppress(FileNotFoundError):
        return os.open(path, FLAGS), False
    return None, False


def _check_file(handle: int) -> None:
    """Refuse a file that no run made, which must not be overwritten."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "the file has another name elsewhere (a hard link)")


def _flock(handle: int) -> bool | None:
    """Lock the file by the kernel; return whether it was locked, None: locks are not supported."""
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
    """Write this process's name into a file whose lock it holds; return its descriptor."""
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, owner.encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return handle


def _take_over(path: Path, handle: int, owner: Owner) -> int | None:
    """Replace a dead owner's file by this process's in one step; None: try again, the file changed.

    Two processes may find the same owner dead. Only one at a time has the claim, and checks again under it.
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
    """Read the owner named in the file; None if none is written within :data:`PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        owner = Owner.parse(os.pread(handle, LARGEST, 0))
        if owner or time.monotonic() > deadline:
            return owner
        time.sleep(PATIENCE / 20)


def _is_at(path: Path, handle: int) -> bool:
    """Return whether ``path`` still names the file that is open."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _refused(path: Path, owner: Owner | None, *, by_kernel: bool) -> Refusal:
    who = f"by {owner}" if owner else "by an unknown process"
    fix = "wait until it has ended, or end it; or name another folder"
    if owner and owner.pid == os.getpid() and owner.here and owner.alive():
        fix = "close() the Run that trains there in this process"
    elif by_kernel and owner and owner.here and not owner.alive():
        who += ", which has ended; but a process that it started still holds the file"
        fix = f"end that process: `fuser -v {path}` shows it"
    elif not by_kernel and not (owner and owner.here and owner.alive()):
        fix = f"if no process still uses the folder, delete {path}"
    return Refusal(f"{path.parent} is in use {who}", where=str(path), fix=fix)
