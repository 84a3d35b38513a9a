"""Deduplication killed at any point resumes, to the bytes of an uninterrupted run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, bytes]:
    """Read a folder's files; remove the creation time from the page."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    found["report.htm"] = re.sub(rb"Written by minillm, [^<]*", b"", found["report.htm"])
    return found


def text(draw: random.Random, words: int) -> str:
    return " ".join(f"word{draw.randrange(3000)}" for _ in range(words))


def corpus(path: Path, documents: int, words: int) -> Path:
    """Write texts; some of the second half equal, resemble, or share a span with an earlier text.

    The examples of a report then name documents in earlier parts.
    """
    draw = random.Random(5)
    texts = [text(draw, words)]
    while len(texts) < documents:
        earlier, kind = draw.choice(texts), draw.random()
        if len(texts) < documents // 2:
            texts.append(text(draw, words))
        elif kind < 0.1:
            texts.append(earlier)
        elif kind < 0.2:
            texts.append(f"{earlier} {text(draw, 2)}")
        elif kind < 0.3:
            texts.append(f"{text(draw, words)} {earlier[: words * 4]}")
        else:
            texts.append(text(draw, words))
    path.write_text("".join(f'{{"text": "{one}", "n": {n}}}\n' for n, one in enumerate(texts)))
    return path


def test_a_kill_anywhere_costs_no_byte(forked: Callable[..., Any], tmp_path: Path) -> None:
    path, to = corpus(tmp_path / "in.jsonl", 400, 60), tmp_path / "whole"

    def start(after: int, folder: Path) -> Any:
        return forked("killed_dedup", str(path), str(folder), str(after))

    done = start(0, to)
    assert done.code == 0, done.stderr
    whole, events = contents(to), int(done.stdout.split()[-1])
    assert len(whole) > 5
    assert events > 60
    went_on = 0
    for after in range(1, events + 1, 5):
        folder = tmp_path / f"killed-{after}"
        killed = start(after, folder)
        assert killed.code == -signal.SIGKILL, killed.stderr
        assert not folder.exists() or contents(folder) == whole
        if not folder.exists():
            again = start(0, folder)
            assert again.code == 0, again.stderr
            went_on += "continues the work" in again.stdout
        assert contents(folder) == {
            name: data.replace(b"whole", folder.name.encode()) for name, data in whole.items()
        }
    assert went_on > events // 5 - 5


def test_many_kills_of_one_run_cost_no_byte(forked: Callable[..., Any], tmp_path: Path) -> None:
    path = corpus(tmp_path / "in.jsonl", 400, 60)
    for after in (0, 37):
        for _ in range(20):
            done = forked("killed_dedup", str(path), str(tmp_path / f"out{after}"), str(after))
            if done.code == 0:
                break
            assert done.code == -signal.SIGKILL, done.stderr
        else:
            pytest.fail("it does not come any further")
    assert contents(tmp_path / "out0") == contents(tmp_path / "out37")


def started(path: Path, to: Path) -> subprocess.Popen[str]:
    """Start the command in its own session, and wait until its worker processes run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minillm_core", "data", "dedup", str(path), "--to", str(to)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signed = to.with_name(f"{to.name}.unfinished") / "digests.bin"
    for _ in range(600):
        if signed.exists() and signed.stat().st_size:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate())


def finished(path: Path, to: Path) -> dict[str, bytes]:
    process = started(path, to)
    assert process.communicate(timeout=120)[1] is not None
    assert process.returncode == 0
    return contents(to)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file that keeps several processes busy for seconds."""
    return corpus(tmp_path_factory.mktemp("big") / "in.jsonl", 4000, 600)


@pytest.fixture(scope="module")
def result(big: Path) -> dict[str, bytes]:
    return finished(big, big.parent / "result")


@pytest.mark.parametrize("whole_group", [True, False])
def test_ctrl_c_ends_it_within_a_second_or_so(
    big: Path, result: dict[str, bytes], tmp_path: Path, whole_group: bool
) -> None:
    to = tmp_path / "result"
    process = started(big, to)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2 or os.cpu_count() == 1
    before = time.monotonic()
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - before < 3.0  # one second on an idle machine
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "the same command continues" in err
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not to.exists()
    assert finished(big, to) == result


def test_its_processes_end_with_it(big: Path, result: dict[str, bytes], tmp_path: Path) -> None:
    to = tmp_path / "result"
    process = started(big, to)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=30)
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not to.exists()
    assert finished(big, to) == result
