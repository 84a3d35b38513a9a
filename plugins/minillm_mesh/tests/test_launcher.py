"""Processes that are started and ended together, with the exit code of a single process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from minillm_mesh.launcher import launch


def ended(script: str, processes: int = 2) -> int:
    """Run a script in several processes, with ``rank`` defined."""
    return launch(
        processes, ["-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{script}"]
    )


def test_all_that_end_well_are_0_and_each_knows_its_place(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    shown = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(' '.join(os.environ[n] for n in {names}))"
    listening = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert ended(shown, 3) == 0
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {str(n): f"{n} {n} 3 3 127.0.0.1" for n in range(3)}
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == listening


@pytest.mark.parametrize("code", [2, 3, 5, 6])
def test_the_code_of_one_that_fails_ends_all(code: int) -> None:
    began = time.monotonic()
    assert ended(f"sys.exit({code}) if rank == 1 else time.sleep(60)") == code
    assert time.monotonic() - began < 20


def test_what_a_failure_leads_to_is_not_the_code() -> None:
    """A process that has lost another one exits with 1, possibly before the launcher's next poll."""
    assert ended("time.sleep(0.01 * rank); sys.exit(1 if rank == 0 else 3)") in (1, 3)
    assert ended("sys.exit(1)") == 1


def test_one_that_is_killed_is_named_and_is_128_and_the_signal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert ended("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)") == 137
    assert "rank 1: ended by SIGKILL" in capfd.readouterr().err
    assert ended("os.kill(os.getpid(), 11) if rank == 0 else time.sleep(60)") == 139
    assert "rank 0: ended by SIGSEGV" in capfd.readouterr().err


SIGNALLED = """
import sys
from minillm_mesh.launcher import launch
for script in sys.argv[1:]:
    print(launch(2, ["-c", script]), flush=True)
"""
LISTENS = """
import os, signal, sys, time
seen = []
def note(number, frame):
    seen.append(number)
    if len(seen) == 2:
        os._exit(130)
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, note)
open(f"FOLDER/{os.environ['RANK']}", "w").close()
while not seen:
    time.sleep(0.02)
time.sleep(SAVES)
sys.exit(75)
"""
DEAF = """
import os, time
open(f"FOLDER/{os.environ['RANK']}", "w").close()
time.sleep(60)
"""
INT, TERM = signal.SIGINT, signal.SIGTERM
CASES = (
    (LISTENS.replace("SAVES", "0.3"), (INT,), 75),
    (LISTENS.replace("SAVES", "0.3"), (TERM,), 75),
    (LISTENS.replace("SAVES", "60"), (INT, INT), 130),
    (LISTENS.replace("SAVES", "60"), (TERM, INT), 130),
    (DEAF, (TERM,), 130),  # ended before it could listen
)


@pytest.mark.slow
def test_signals_are_passed_on_and_the_code_is_rank_0_s(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(CASES))]
    for folder in folders:
        folder.mkdir()
    scripts = [
        script.replace("FOLDER", str(folder))
        for (script, _, _), folder in zip(CASES, folders, strict=True)
    ]
    command = [sys.executable, "-c", SIGNALLED, *scripts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for (_, signals, code), folder in zip(CASES, folders, strict=True):
            end = time.monotonic() + 120
            while len(os.listdir(folder)) < 2:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
            for number in signals:
                process.send_signal(number)
                time.sleep(0.3)
            assert int(process.stdout.readline()) == code, (folder.name, signals)
        assert process.wait(timeout=60) == 0
