"""Fixtures: documents of random ids, and the expected stream, built by concatenation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core.config.schema import DataConfig
from minillm_core.data import Corpus, Documents, open_corpus


@pytest.fixture(scope="session")
def reference_stream() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    def stream(documents: Documents, seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first tokens of the endless stream, and where documents begin in it."""
        ids, starts, epoch = [], [], 0
        while len(ids) < tokens:
            for index in np.random.default_rng(seed + epoch).permutation(len(documents)):
                document = documents[index].tolist()
                ids += document
                starts += [True] + [False] * (len(document) - 1)
            epoch += 1
        return np.array(ids[:tokens]), np.array(starts[:tokens])

    return stream


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[..., Corpus]:
    def corpus(
        paths: Sequence[Path],
        *,
        vocab: int = 300,
        seq_len: int = 8,
        say: Callable[[str], None] = lambda line: None,
        detail: Callable[[str], None] | None = None,
        **config: Any,
    ) -> Corpus:
        settings = DataConfig(paths=tuple(map(str, paths)), **config)
        cache = tmp_path / "cache"
        return open_corpus(settings, vocab, seq_len, cache=cache, say=say, detail=detail)

    return corpus


@pytest.fixture
def texts() -> list[str]:
    """Return forty documents with a learnably small vocabulary."""
    words = np.array(["the", "a", "cat", "sat", "ran", "on", "mat", "and", "then", "it"])
    rng = np.random.default_rng(0)
    return [
        f"{number}: " + " ".join(rng.choice(words, rng.integers(5, 60))) for number in range(40)
    ]
