"""Filter and mix, killed at any point and restarted, write the same bytes as an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Run = Callable[..., int]


@pytest.fixture
def run(forked: Callable[..., Any]) -> Run:
    """Run the program, and kill it at the at-th thing that it does with its folder: see killed.py."""

    def run(at: int, part: int, noted: float, *arguments: str) -> int:
        done = forked("killed", str(at), str(part), str(noted), *arguments)
        assert done.code in (0, -signal.SIGKILL), done.stderr
        return done.code

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".htm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with three sources and a tokenizer."""
    from minillm_core.documents import Tokenizer

    folder = tmp_path_factory.mktemp("sources")
    draw = random.Random(0)
    words = [f"word{i}" for i in range(500)] + ["the", "of", "and", "to"] * 20
    for name, count in (("a", 40), ("b", 25), ("c", 12)):
        lines = []
        for number in range(count):
            ends = [". ", " ", ".\n", "\n", " { "] if number % 7 == 0 else [". ", " ", ".\n"]
            size = draw.randrange(20, 150)
            text = "".join(draw.choice(words) + draw.choice(ends) for _ in range(size))
            lines.append(json.dumps({"text": text, "id": f"{name}{number}"}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "malformed.jsonl").write_text("nonsense\n" + (folder / "b.jsonl").read_text())
    Tokenizer.train(["word the of and " * 20], 300).save(folder / "tokenizer.json")
    return folder


COMMANDS = {
    "filter": ("filter", "a.jsonl", "malformed.jsonl", "--malformed", "skip"),
    "filter lines": ("filter", "a.jsonl", "b.jsonl", "--rules", "c4,gopher.short"),
    "mix by weights": ("mix", "a.jsonl:2", "b.jsonl:3", "c.jsonl:1", "--repeat"),
    "mix by size": ("mix", "a.jsonl", "b.jsonl", "c.jsonl", "--temperature", "2"),
    "mix by tokens": ("mix", "a.jsonl:1", "c.jsonl:1", "--tokenizer", "tokenizer.json"),
    "mix like": ("mix", "a.jsonl", "b.jsonl", "--like", "c.jsonl", "--size", "20000"),
}


@pytest.mark.parametrize(("part", "noted"), [(4000, 1000.0), (4000, 0.0), (1 << 30, 0.0)])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_killed_goes_on_to_the_same_bytes(
    run: Run, folder: Path, tmp_path: Path, command: str, part: int, noted: float
) -> None:
    name, *given = COMMANDS[command]
    arguments = [str(folder / one) if ".json" in one else one for one in given]
    assert run(0, part, 1000.0, "data", name, *arguments, "--to", str(tmp_path / "whole")) == 0
    draw, kills, to = random.Random(f"{command} {part} {noted}"), 0, tmp_path / "killed"
    most = 80  # the first start is killed early, or it might be whole
    while run(draw.randrange(40, most), part, noted, "data", name, *arguments, "--to", str(to)):
        kills, most = kills + 1, 300
        assert not to.exists() or not any(to.iterdir())
        assert kills < 40
    assert contents(to) == contents(tmp_path / "whole")
    assert not to.with_name("killed.unfinished").exists()
    assert kills > 0


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file on which a command works for seconds: some twelve parts."""
    source = tmp_path_factory.mktemp("long") / "a.jsonl"
    with source.open("w") as file:
        for number in range(8000):
            text = " ".join(f"w{number * 7 + i}" for i in range(100 + number % 50))
            file.write(json.dumps({"text": f"The end of {text}."}) + "\n")
    return source


@pytest.mark.parametrize("command", ["filter", "mix"])
def test_ctrl_c_ends_a_command_and_the_next_start_goes_on(
    long: Path, tmp_path: Path, command: str
) -> None:
    to, unfinished = tmp_path / "out", tmp_path / "out.unfinished"
    arguments = ["data", command, str(long), "--to", str(to)]
    script = "import sys, minillm_data.output as o; from minillm_core.cli.main import main\n"
    script += "o.NOTED = 0.2; o.PART = 1 << 19; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (unfinished / "part-00001.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 5  # about one second, on a busy machine
    assert process.returncode == 130
    assert "the same command continues from there" in err
    assert not to.exists()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "continues after" in done.stderr
    again = [*arguments[:-1], str(tmp_path / "whole")]
    assert subprocess.run([sys.executable, "-c", script, *again], check=False).returncode == 0
    assert contents(to) == contents(tmp_path / "whole")


def test_another_command_or_another_file_begins_anew(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    source, to = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes((folder / "a.jsonl").read_bytes())
    arguments = ("data", "filter", str(source), "--to", str(to))
    assert run(100, 4000, 0.0, *arguments, "--rules", "none", "--language", "en")
    assert run(100, 4000, 0.0, *arguments)
    source.write_bytes((folder / "b.jsonl").read_bytes())
    assert run(0, 4000, 0.0, *arguments) == 0
    assert run(0, 4000, 0.0, *arguments[:-1], str(tmp_path / "whole")) == 0
    assert contents(to) == contents(tmp_path / "whole")


@pytest.mark.parametrize("lost", ["part-00000.jsonl", "part-00000.jsonl.tmp", "progress.json"])
def test_what_an_earlier_start_lost_is_made_again(
    run: Run, folder: Path, tmp_path: Path, lost: str
) -> None:
    arguments = ("data", "filter", str(folder / "a.jsonl"), "--rules", "gopher.short", "--to")
    part = 1 << 30 if lost.endswith("tmp") else 3000
    assert run(90, part, 0.0, *arguments, str(tmp_path / "out"))
    left = tmp_path / "out.unfinished" / lost
    left.write_bytes(left.read_bytes()[:10])
    if lost == "part-00000.jsonl":
        left.unlink()
    assert run(0, part, 0.0, *arguments, str(tmp_path / "out")) == 0
    assert run(0, part, 0.0, *arguments, str(tmp_path / "whole")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
