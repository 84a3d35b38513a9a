"""Tests of texts divided for tokenizer training and encoding: exact, except within endless words."""

from __future__ import annotations

import gzip
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from minillm_core.data import Tokenizer, bpe, cutting, formats, tokenise
from minillm_core.data.cutting import LEARNED, WORD, Continued, parts
from minillm_core.data.formats import Reading

ALPHABET = [" ", "\n", "\r\n", "\t", "a", "Zé", "it's", "'", "''s", "42", "²", "-", "...", "\x00",
            "界", "，", "“", "ab1", "1a", ".a", "\u0301", "\x1c", "\x85", "\u00a0"]  # fmt: skip
pieces = st.lists(
    st.tuples(st.sampled_from(ALPHABET), st.sampled_from([1, 1, 2, 3, 700, 1024, 1025, 2600])),
    max_size=12,
).map(lambda found: "".join(piece * count for piece, count in found))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat's 42 hats, and it's 42 again.\n\n 界，界 aaaa ---- "] * 3, 290)


@given(pieces)
def test_parts_are_the_text_and_no_word_in_them_is_too_long(text: str) -> None:
    found = list(parts(text, LEARNED))
    assert "".join(part for part, _ in found) == text
    edges = [0, *(m.end() for m in cutting.BOUNDARY.finditer(text)), len(text)]
    long = [b - a for a, b in pairwise(edges) if b - a > LEARNED]
    assert [number for _, number in found].count(1) == len(long)
    assert sum(len(part) for part, number in found if number) == sum(long)
    assert all(part for part, _ in found)
    assert max((len(part) for part, _ in found), default=0) <= cutting._PART + 2 * LEARNED


@pytest.mark.slow
@given(pieces)
@example("a" * (2 * WORD + 1))
def test_ids_are_those_of_the_whole_text_unless_a_word_was_cut(
    tokenizer: Tokenizer, text: str
) -> None:
    notes = Counter[str]()
    before, cutting._PART = cutting._PART, 7
    try:
        (ids,) = tokenizer.encode([text], notes)
    finally:
        cutting._PART = before
    assert tokenizer.decode(ids) == text
    assert notes.total() == [number for _, number in parts(text)].count(1)
    if not notes:
        whole = tokenizer._native.encode(text, add_special_tokens=False).ids
        np.testing.assert_array_equal(ids, whole)


@given(st.lists(pieces, min_size=1, max_size=3))
def test_training_does_not_see_where_normal_text_is_divided(texts: list[str]) -> None:
    if any(number for text in texts for _, number in parts(text, LEARNED)):
        return
    whole = tokenizers.Tokenizer.from_str(bpe.train_bpe(iter(texts), 280, lambda: None))
    before, cutting._PART = cutting._PART, 7
    try:
        assert Tokenizer.train(texts, 280).digest == Tokenizer(whole).digest
    finally:
        cutting._PART = before


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_a_large_text_file_comes_in_pieces_with_the_same_ids(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    monkeypatch.setattr(formats, "PIECE", 5000)
    rng = random.Random(0)
    text = "".join(rng.choices(ALPHABET + ["word"] * 20, k=20_000)) + "ä" * 3000
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packing]
    (tmp_path / "a").write_bytes(pack(text.encode()))
    found = list(formats.read_text(tmp_path / "a", packing, Reading(300)))
    assert "".join(found) == text
    assert len(found) > 10
    assert max(map(len, found)) < 3 * 5000
    assert [type(piece) for piece in found] == [str] + [Continued] * (len(found) - 1)
    ids = np.concatenate(tokenizer.encode(found))
    np.testing.assert_array_equal(ids, tokenizer.encode([text])[0])
    (tmp_path / "a").write_bytes(pack(text.encode() + b"\nx\xff"))
    with pytest.raises(Exception, match="not UTF-8") as raised:
        list(formats.read_text(tmp_path / "a", packing, Reading(300)))
    lines, size = text.count("\n") + 2, len(text.encode()) + 2
    assert f"line {lines}, byte {size}" in str(raised.value)


def test_training_in_another_process_gives_the_same_and_beats(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Tokenizer.train(texts, 290)
    monkeypatch.setattr(bpe, "_HERE", 10)
    beats: list[float] = []
    apart = Tokenizer.train(texts, 290, lambda: beats.append(time.monotonic()))
    assert apart.digest == here.digest
    assert len(beats) > 1


def test_a_process_that_fails_is_named(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "_HERE", 10)
    program = [sys.executable, "-c", "raise SystemExit('out of order')"]
    monkeypatch.setattr(bpe, "python", lambda code, *arguments: program)
    with pytest.raises(Exception, match="failed: exit code 1, out of order"):
        Tokenizer.train(texts, 290)


PREPARE = """
import sys
from pathlib import Path
from minillm_core.config.schema import DataConfig
from minillm_core.data import open_corpus, tokenise
tokenise.SAMPLE = int(sys.argv[4])
told = set()
def progress(what, done, total):
    if what not in told:
        told.add(what)
        print(what, flush=True)
try:
    open_corpus(DataConfig(paths=(sys.argv[1],)), int(sys.argv[3]), 8, cache=Path(sys.argv[2]),
                say=lambda line: None, progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text of 40,000 words, and the same so many times that it takes seconds to tokenise."""
    folder = tmp_path_factory.mktemp("long")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(40_000)]
    text = " ".join(rng.choices(words, k=1_500_000))
    (folder / "once.txt").write_text(text)
    (folder / "often.txt").write_text(text * 20)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "vocab", "later", "number"),
    [
        ("checking the files", 4096, 0.0, signal.SIGINT),
        ("training the tokenizer", 4096, 0.0, signal.SIGINT),
        ("training the tokenizer", 4096, 1.1, signal.SIGINT),
        ("training the tokenizer", 4096, 0.4, signal.SIGKILL),
        ("tokenising", 300, 0.4, signal.SIGINT),
        ("tokenising", 300, 0.4, signal.SIGKILL),
    ],
)
def test_preparing_ends_when_it_is_interrupted_and_leaves_nothing(
    long: Path, tmp_path: Path, phase: str, vocab: int, later: float, number: int
) -> None:
    # Tokenisation must last until the signal arrives.
    text = long / ("often.txt" if phase == "tokenising" else "once.txt")
    command = [sys.executable, "-c", PREPARE, str(text), str(tmp_path / "cache")]
    # a short sample where the training of the tokenizer is not what is interrupted
    sample = tokenise.SAMPLE if vocab > 300 else 1 << 20
    command += [str(vocab), str(sample)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while phase not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(later)
        began = time.monotonic()
        process.send_signal(number)
        code = process.wait()
    assert code == (130 if number == signal.SIGINT else -number)
    assert time.monotonic() - began < 5  # a second on an idle machine
    tokens = tmp_path / "cache" / "tokens"
    left = os.listdir(tokens) if tokens.exists() else []
    assert not left if number == signal.SIGINT else all(".tmp-" in name for name in left)
