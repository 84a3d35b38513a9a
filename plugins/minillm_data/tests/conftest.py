"""Rows of text on disk, and a tokenizer for them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from minillm_core.documents import Tokenizer
from minillm_kit import fresh

Write = Callable[..., Path]


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    """Return a function that writes records as JSON lines and returns the path."""

    def write(records: Sequence[dict[str, Any]], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        path.write_text("".join(lines), "utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def prose() -> Callable[..., list[str]]:
    """Return a function that generates documents of random words, determined by a seed."""

    def make(count: int, seed: int = 0, words: int = 80) -> list[str]:
        rng = random.Random(seed)
        stock = ["".join(rng.choices("abcdefgh äö,.", k=rng.randint(1, 9))) for _ in range(300)]
        return [" ".join(rng.choices(stock, k=rng.randint(1, words))) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(["the cat's 42 hats, and it's 42 again. abc äö"] * 3, 290).save(path)
    return path


@pytest.fixture(scope="session")
def forked() -> Callable[..., fresh.Ended]:
    """``forked("killed", ...)``: call the main of a module of this folder in a forked process, to its end.

    A start of Python that imports the program takes half a second of a core, a fork milliseconds.
    """
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    imported = ("killed", "killed_dedup", "minillm_data.cli.filter", "minillm_data.cli.mix")

    def run(module: str, *arguments: str) -> fresh.Ended:
        here = {**os.environ, **own}
        return fresh.run(module, *arguments, environment=here, seconds=600, imported=imported)

    return run
