"""Tests of the lock: one trainer per folder, whatever happened to the previous one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from minillm_core.checkpoint.lock import LOCK, Owner, lock
from minillm_core.errors import MinillmError, Refusal

# Lock the folder, report it, and hold it until standard input ends.
TRAINER = """
import errno, fcntl, os, sys
from pathlib import Path
from minillm_core.checkpoint.lock import lock
from minillm_core.errors import MinillmError, Refusal

def unsupported(handle, operation):
    raise OSError(errno.ENOTSUP, "Operation not supported")

if sys.argv[2] == "record":
    fcntl.flock = unsupported
def tell(line):
    os.write(1, line.encode() + b"\\n")  # in one piece, beside a child's

tell("ready")
sys.stdin.readline()
try:
    with lock(Path(sys.argv[1])):
        if sys.argv[3] == "fork" and os.fork() == 0:
            tell(f"child {os.getpid()}")
            sys.stdin.read()
            sys.exit()
        tell("taken")
        sys.stdin.read()
except Refusal as refusal:
    tell(f"refused {str(refusal)!r}")
    sys.exit(refusal.exit_code)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that waits for a line, and then trains in ``tmp_path``."""
    with ExitStack() as stack:

        def popen(by: str, then: str = "") -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(tmp_path), by, then],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            return process

        yield popen


def go(*processes: subprocess.Popen[str]) -> list[str]:
    """Release them at once; return the output of each."""
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.stdout.readline().strip() for process in processes if process.stdout]


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a file system without locks."""

    def unsupported(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)


@pytest.fixture(params=["kernel", "record"])
def by(request: pytest.FixtureRequest) -> str:
    """Select what decides: the kernel's lock, or the file's content."""
    if request.param == "record":
        request.getfixturevalue("no_flock")
    return request.param


def leave(out: Path, **changes) -> Owner:
    """Leave a stale lock file."""
    owner = Owner.this().model_copy(update=changes)
    (out / LOCK).write_bytes(owner.encode())
    return owner


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def state(out: Path) -> tuple:
    """Return everything that a refusal must not change."""
    files = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    return files, out.stat().st_mtime_ns


def test_the_owner_is_named_and_the_file_goes_with_it(tmp_path: Path, by: str) -> None:
    with lock(tmp_path) as held:
        document = json.loads((tmp_path / LOCK).read_bytes())
        owner = held.owner
        assert document == owner.model_dump()
        assert (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
        assert owner.started == psutil.Process().create_time()
    assert not list(tmp_path.iterdir())


def test_a_second_one_is_refused_and_changes_nothing(tmp_path: Path, by: str) -> None:
    with lock(tmp_path) as held:
        before = state(tmp_path)
        with pytest.raises(Refusal, match=f"process {os.getpid()} on ") as refusal, lock(tmp_path):
            pass
        assert state(tmp_path) == before
        assert refusal.value.exit_code == 2
        assert held.owner.since in str(refusal.value)
        assert "close() the Run that trains there in this process" in str(refusal.value)
    with lock(tmp_path):
        pass


def test_an_error_inside_gives_the_folder_back(tmp_path: Path, by: str) -> None:
    with pytest.raises(KeyboardInterrupt), lock(tmp_path):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.broad(1)
@pytest.mark.parametrize("many", [2, 8])
def test_of_many_at_once_exactly_one_trains(start: Start, by: str, many: int) -> None:
    processes = [start(by) for _ in range(many)]
    said = go(*processes)
    assert sorted(line.split()[0] for line in said) == ["refused"] * (many - 1) + ["taken"]
    winner = processes[said.index("taken")]
    for process, line in zip(processes, said, strict=True):
        if process is not winner:
            assert process.wait() == 2
            assert f"process {winner.pid} on" in line
    winner.communicate()
    assert winner.returncode == 0


def test_of_many_at_once_exactly_one_takes_over(tmp_path: Path, start: Start, by: str) -> None:
    leave(tmp_path, pid=dead_pid())
    said = go(*[start(by) for _ in range(4)])
    assert sorted(line.split()[0] for line in said) == ["refused"] * 3 + ["taken"]
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_who_found_the_owner_dead_looks_again_before_taking_over(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes over just after the dead owner was detected."""
    real, winner, asked = Owner.alive, lock(tmp_path), []
    leave(tmp_path, pid=dead_pid())

    def alive(owner: Owner) -> bool:
        asked.append(owner)
        if len(asked) == 1:
            winner.__enter__()
            return False
        return real(owner)

    monkeypatch.setattr(Owner, "alive", alive)
    with pytest.raises(Refusal, match=f"process {os.getpid()} on"), lock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    winner.__exit__(None, None, None)


def test_after_a_kill_the_next_one_starts_at_once(tmp_path: Path, start: Start, by: str) -> None:
    for _ in range(2):
        process = start(by)
        assert go(process) == ["taken"]
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).exists()
    with lock(tmp_path):
        pass


def test_a_forked_child_neither_holds_the_folder_nor_gives_it_back(
    tmp_path: Path, start: Start, by: str
) -> None:
    owner = start(by, "fork")
    said = go(owner)
    assert owner.stdout
    said.append(owner.stdout.readline().strip())
    (child,) = [int(line.split()[1]) for line in said if line.startswith("child")]
    with pytest.raises(Refusal), lock(tmp_path):
        pass
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert psutil.pid_exists(child)
    with lock(tmp_path):
        assert owner.stdin
        owner.stdin.close()
        assert owner.stdout.read() == ""  # the child has left its block, and ended
        assert (tmp_path / LOCK).exists()
        with pytest.raises(Refusal), lock(tmp_path):
            pass


def test_a_child_that_holds_the_file_after_its_parent_is_told_of(tmp_path: Path) -> None:
    leave(tmp_path, pid=dead_pid())
    with (tmp_path / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match=r"has ended; but.*\n.*\n.*fuser -v"), lock(tmp_path):
            pass


def test_a_number_that_another_process_has_now_fools_nobody(tmp_path: Path, by: str) -> None:
    parent = psutil.Process(os.getppid())  # alive, but not the lock's owner
    leave(tmp_path, pid=parent.pid, started=1e9, uptime=-5.0)
    with lock(tmp_path):
        pass


def test_a_clock_that_was_set_makes_nobody_dead(tmp_path: Path) -> None:
    owner = Owner.this()
    assert owner.alive()
    assert owner.model_copy(update={"started": owner.started - 86_400}).alive()
    assert owner.model_copy(update={"uptime": owner.uptime - 86_400}).alive()


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        ps = psutil.Process(process.pid)
        started = ps.create_time()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        owner = Owner.this().model_copy(
            update={
                "pid": process.pid,
                "started": started,
                "uptime": started - psutil.boot_time(),
            }
        )
        assert ps.status() == psutil.STATUS_ZOMBIE
        assert not owner.alive()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"[]", b'{"pid": 1}', b"\xff" * 5000, b"[" * 4096, b"null"]
)
def test_garbage_means_nothing_to_the_kernel(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with lock(tmp_path) as held:
        assert Owner.parse((tmp_path / LOCK).read_bytes()) == held.owner
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"garbage", "other host", "claimed"])
def test_what_only_a_person_can_decide_is_left_to_one(
    tmp_path: Path, no_flock: None, content: bytes | str
) -> None:
    match content:
        case bytes():
            (tmp_path / LOCK).write_bytes(content)
        case "other host":
            leave(tmp_path, host="elsewhere\x1b[31m", pid=dead_pid())
        case _:  # a process that took over was killed between its two steps
            leave(tmp_path, pid=dead_pid())
            (tmp_path / f"{LOCK}.takeover").write_bytes(b"")
    before = state(tmp_path)
    fix = r"if no process still uses the folder, delete .*lock\.json"
    with pytest.raises(Refusal, match=fix) as refusal, lock(tmp_path):
        pass
    assert "\x1b" not in str(refusal.value)
    assert state(tmp_path) == before


def test_another_hosts_name_means_nothing_to_the_kernel(tmp_path: Path) -> None:
    leave(tmp_path, host="elsewhere")
    with lock(tmp_path):
        pass


def test_what_the_content_decides_is_said_aloud(tmp_path: Path, no_flock: None) -> None:
    told: list[str] = []
    with lock(tmp_path, told.append):
        pass
    (line,) = told
    assert "cannot lock files: lock.json is trusted instead" in line


def test_what_the_kernel_decides_needs_no_words(tmp_path: Path) -> None:
    told: list[str] = []
    with lock(tmp_path, told.append):
        pass
    assert not told


def test_the_file_of_somebody_who_came_after_is_left_alone(tmp_path: Path, by: str) -> None:
    first, second = lock(tmp_path), lock(tmp_path)
    first.__enter__()
    (tmp_path / LOCK).unlink()  # deleted by hand, against the rules
    with second:
        first.__exit__(None, None, None)
        with pytest.raises(Refusal), lock(tmp_path):
            pass


def test_a_file_that_goes_away_while_it_is_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner removes its file after we have opened it, and before we lock it."""
    real, calls = fcntl.flock, []

    def flock(handle: int, operation: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / LOCK).touch()
    with lock(tmp_path):
        assert Owner.parse((tmp_path / LOCK).read_bytes())
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["folder", "link", "hard link", "pipe"])
def test_what_is_no_file_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "out" / LOCK, tmp_path / "target"
    path.parent.mkdir()
    target.write_bytes(b"content")
    {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(target),
        "hard link": lambda: path.hardlink_to(target),
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    with pytest.raises(Refusal, match="cannot be locked"), lock(path.parent):
        pass
    assert path.exists()
    assert target.read_bytes() == b"content"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_no_name_is_a_refusal_and_leaves_nothing(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_args) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Refusal, match=os.strerror(code)), lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="cannot be locked: No such file"), lock(tmp_path / "no"):
        pass


def test_the_holder_notices_that_the_folder_is_no_longer_its_own(tmp_path: Path, by: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with lock(out) as held:
        held.check()
        moved = out.rename(tmp_path / "moved")
        with pytest.raises(MinillmError, match="was deleted or moved") as error:
            held.check()
        assert error.value.exit_code == 1
        out.mkdir()
        (out / LOCK).write_bytes((moved / LOCK).read_bytes())
        with pytest.raises(MinillmError, match=r"lock\.json was removed or replaced"):
            held.check()
    assert (out / LOCK).exists()  # which this process must not remove
