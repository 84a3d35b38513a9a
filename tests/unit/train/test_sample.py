"""What the model writes is shown whole, reproducibly, and cannot command a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.train.sample import pick, sample


class Bytes:
    """One token a byte, as far as it goes; 0 ends a text."""

    size = 257
    end_of_text = 0

    def decode(self, ids: list[int]) -> str:
        return bytes(index - 1 for index in ids).decode("utf-8", errors="replace")


def writer(bigram, text: bytes):
    """A model that is sure of what follows: each byte of ``text`` may stand once."""
    trainer = bigram(vocab=300)
    trainer.table[:] = -50.0
    trainer.table[:, 299] = 1e6  # an unused row of the embedding
    for before, after in zip(
        [0, *(byte + 1 for byte in text)], [byte + 1 for byte in text] + [0], strict=True
    ):
        trainer.table[before, after] = 50.0
    return trainer


def write(trainer, **options) -> str:
    return sample(trainer, Bytes(), **({"context": 8} | options))


def test_it_writes_until_the_end_of_the_text(bigram) -> None:
    assert write(writer(bigram, b"once upA")) == "once upA"
    assert write(writer(bigram, b"abcdef")) == "abcdef"
    assert write(writer(bigram, b"")) == ""


def test_half_a_character_at_the_end_is_left_out(bigram) -> None:
    text = "ab\u00fc".encode()
    assert write(writer(bigram, text)) == "ab\u00fc"
    assert write(writer(bigram, text), tokens=3) == "ab"
    face = "x\U0001f600".encode()
    for tokens in range(1, 5):
        assert write(writer(bigram, face), tokens=tokens) == "x"
    assert write(writer(bigram, face), tokens=5) == "x\U0001f600"


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
def test_a_terminal_is_not_commanded(bigram, text: bytes, shown: str) -> None:
    assert write(writer(bigram, text)) == shown


def test_the_seed_decides(bigram) -> None:
    trainer = bigram(vocab=257)
    trainer.table = np.random.default_rng(0).standard_normal((257, 257)).astype(np.float32)
    first = write(trainer, seed=1, tokens=30)
    assert first == write(trainer, seed=1, tokens=30)
    assert first != write(trainer, seed=2, tokens=30)


def test_the_model_sees_no_more_than_its_context(bigram) -> None:
    trainer = bigram(vocab=257)
    lengths = []
    real = trainer.next_logits

    def next_logits(batch: Any) -> np.ndarray:
        lengths.append(batch["ids"].shape[1])
        return real(batch)

    trainer.next_logits = next_logits
    write(trainer, tokens=9, context=4)
    assert max(lengths) <= 4


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20),
    st.floats(0.05, 3),
    st.integers(0, 100),
)
def test_any_logits_give_an_id(logits: list[float], temperature: float, seed: int) -> None:
    drawn = pick(np.asarray(logits, np.float32), temperature, np.random.default_rng(seed))
    assert 0 <= drawn < len(logits)


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.asarray([0.1, 0.2, 0.7], np.float32))
    random = np.random.default_rng(0)
    counts = np.bincount([pick(logits, 1.0, random) for _ in range(3000)], minlength=3) / 3000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.03)
    cold = [pick(logits, 0.01, random) for _ in range(100)]
    assert set(cold) == {2}
