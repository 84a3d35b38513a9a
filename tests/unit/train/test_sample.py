"""Tests of samples: shown in full, reproducible, and without control of the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.data import Documents
from minillm_core.train.generate import TextGenerator, prompts, sample


@pytest.fixture
def write(bytewise, sure_of):
    """Sample from a model that is certain, until the end."""

    def written(text: bytes, **options) -> str:
        given: dict[str, Any] = {"context": 8, **options}
        return sample(TextGenerator(sure_of(text), bytewise, given.pop("context")), **given)

    return written


def test_it_writes_until_the_end_of_the_text(write) -> None:
    assert write(b"once upA") == "once upA"
    assert write(b"abcdef") == "abcdef"
    assert write(b"") == ""


def test_half_a_character_at_the_end_is_left_out(write) -> None:
    text = "ab\u00fc".encode()
    assert write(text) == "ab\u00fc"
    assert write(text, tokens=3) == "ab"
    face = "x\U0001f600".encode()
    for tokens in range(1, 5):
        assert write(face, tokens=tokens) == "x"
    assert write(face, tokens=5) == "x\U0001f600"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"a\x1b[31mb", "ab"),
        (b"a\x1b]0;evil\x07b", "ab"),
        (b"a\rb\x08c", "abc"),
        (b"a\tb\nc", "a\tb\nc"),
        ("a\u202eb".encode(), "ab"),
    ],
)
def test_a_terminal_is_not_commanded(write, text: bytes, shown: str) -> None:
    assert write(text) == shown


def test_the_seed_decides(bigram, bytewise) -> None:
    trainer = bigram(vocab=257)
    trainer.table = np.random.default_rng(0).standard_normal((257, 257)).astype(np.float32)
    texts = [
        sample(TextGenerator(trainer, bytewise, 8), seed=seed, tokens=30) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_the_plugins_batches_are_what_it_is_shown(sure_of, bytewise) -> None:
    phases = []

    def on_batch(batch, phase):
        phases.append(phase)
        return batch

    assert sample(TextGenerator(sure_of(b"ab"), bytewise, 8, on_batch)) == "ab"
    assert phases == ["decode"] * 3


def test_a_prompt_is_continued_and_not_repeated(sure_of, bytewise) -> None:
    assert sample(TextGenerator(sure_of(b"once upA"), bytewise, 20), "once") == " upA"
    assert sample(TextGenerator(sure_of(b"once upA"), bytewise, 3), "once up") == "A"


def test_a_sample_ends_when_it_is_told_to_or_takes_too_long(sure_of, bytewise, clock) -> None:
    model = sure_of(b"abcdefgh")
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 3

    assert sample(TextGenerator(model, bytewise, 9), stopped=stopped) == "abc"

    def slow() -> float:
        clock.now += 1.0
        return clock.now

    assert sample(TextGenerator(model, bytewise, 9), seconds=5.0, clock=slow) == "abcd"


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (
            ["\n\n  one two three four five six seven eight nine ten\n", "#!/bin/sh -e", "...", "second one"],
            ["one two three four five six seven eight", "second"],
        ),
        (["the same line\nx", "the same line\ny", "another line\nz"], ["the same line", "another line"]),
        # half of a document that is no longer than a prompt, in words or characters
        (["Order 12: apples x4 for Ann.\n", "charlotteanne"], ["Order 12: apples", "charlo"]),
        # one long document: its beginning, and a line within it
        (["first line\n" + "x\n" * 20 + "half of a line\nwhole line inside\n" + "y\n" * 10],
         ["first line", "whole line inside"]),
        (["\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03" * 20], ["\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03" * 20]),
        (["1 2 3", "4"], []),
    ],
)  # fmt: skip
def test_prompts_are_beginnings_of_documents(texts: list[str], found: list[str]) -> None:
    documents = Documents.of([[ord(letter) for letter in text] for text in texts], 70_000)
    expected = [text[:60] for text in found]
    assert prompts(documents, Letters(), 2)[: len(expected)] == expected  # type: ignore[arg-type]
    if not expected:
        assert prompts(documents, Letters(), 2) == []  # type: ignore[arg-type]
