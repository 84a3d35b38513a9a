"""Stand-ins: a trainable bigram model in NumPy, synthetic batches, and a manual clock."""

from __future__ import annotations

import codecs
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm_core.backends.base import Binding, Snapshot, StepResult, Trainer

VOCAB = 8


@dataclass
class Clock:
    """A clock that is advanced by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class FakeBatch:
    micro: tuple[Mapping[str, np.ndarray], ...]
    supervised: int
    real: int
    padded: int
    cursor: Mapping[str, Any] = field(default_factory=dict)


class BigramTrainer(Trainer):
    """A trainer of logits (V, V) by gradient descent with momentum; all calls are recorded in ``log``.

    Args:
        clock: advanced by ``cost`` seconds in each step, or in each read if ``late``.
        losses: step -> a loss to report instead of the true one.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        cost: float = 1.0,
        late: bool = False,
        losses: Mapping[int, float] | None = None,
        witnessed: Mapping[str, int] | None = None,
        vocab: int = VOCAB,
    ) -> None:
        self.binding = Binding(
            "numpy", "cpu", "a CPU", "the test says so", "float32", False, False, True
        )
        self.table = np.zeros((vocab, vocab), np.float32)
        self.momentum = np.zeros_like(self.table)
        self.log: list[str] = []
        self.values: list[Mapping[str, float]] = []
        self.steps = 0
        self.clock, self.cost, self.late = clock or Clock(), cost, late
        self.losses, self.witnessed = losses or {}, witnessed or {}
        self.on_step: Callable[[int], None] = lambda step: None

    def _gradient(self, batch: Mapping[str, np.ndarray]) -> tuple[float, np.ndarray]:
        ids, labels = batch["ids"].ravel(), batch["labels"].ravel()
        ids, labels = ids[labels >= 0], labels[labels >= 0]
        logits = self.table[ids].astype(np.float64)
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        loss = -np.log(probabilities[np.arange(len(ids)), labels]).sum()
        probabilities[np.arange(len(ids)), labels] -= 1
        gradient = np.zeros(self.table.shape)
        np.add.at(gradient, ids, probabilities)
        return float(loss), gradient

    def step(
        self,
        micro: Sequence[Any],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Any = lambda: False,
    ) -> Any:
        self.steps += 1
        self.log.append(f"step {self.steps}")
        self.values.append(dict(values))
        parts = [self._gradient(batch) for batch in micro]
        gradient = sum((part[1] for part in parts), np.zeros(self.table.shape)) / supervised
        self.momentum = (0.9 * self.momentum + gradient).astype(np.float32)
        self.table = (self.table - values["train.lr"] * self.momentum).astype(np.float32)
        if not self.late:
            self.clock.now += self.cost
        self.on_step(self.steps)
        loss = sum(part[0] for part in parts) / supervised
        return self.steps, self.losses.get(self.steps, loss), float(np.linalg.norm(gradient))

    def read(self, handle: Any) -> StepResult:
        step, loss, norm = handle
        self.log.append(f"read {step}")
        if self.late:
            self.clock.now += self.cost
        return StepResult(loss, norm)

    def evaluate(self, batches: Any) -> tuple[float, int]:
        self.log.append("evaluate")
        batches = list(batches)
        nats = sum(self._gradient(batch)[0] for batch in batches)
        return nats, sum(int((batch["labels"] >= 0).sum()) for batch in batches)

    def next_logits(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        assert batch["ids"].dtype == np.int32
        return self.table[batch["ids"][0, -1]]

    def decoding(self) -> Any:
        return SimpleNamespace(feed=self.next_logits)  # a bigram model has no lookback

    def snapshot(self) -> Any:
        self.log.append("arrays")
        held = {"model.table": self.table, "optimizer.sgd.m.table": self.momentum}
        return Snapshot(lambda: held)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.table = np.array(arrays["model.table"])

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.load(arrays)
        self.momentum = np.array(arrays["optimizer.sgd.m.table"])

    def restart(self, seed: int) -> None:
        self.table[:], self.momentum[:] = 0, 0

    def witnesses(self) -> Mapping[str, int]:
        return self.witnessed

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def peak_bytes(self) -> int | None:
        return None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def clocks() -> type[Clock]:
    return Clock


@pytest.fixture(scope="session")
def bigram() -> type[BigramTrainer]:
    return BigramTrainer


@pytest.fixture(scope="session")
def stream() -> Callable[..., Iterator[FakeBatch]]:
    """Return endless batches of counting-up text; those numbered in ``empty`` have no labels."""

    def batches(empty: Container[int] = (), rows: int = 2, length: int = 6) -> Iterator[FakeBatch]:
        for number in itertools.count(1):
            ids = (np.arange(rows * length + 1) + number).astype(np.int32) % VOCAB
            labels = ids[1:].reshape(rows, length).copy()
            labels[0, 0] = -1
            if number in empty:
                labels[:] = -1
            micro = ({"ids": ids[:-1].reshape(rows, length), "labels": labels},)
            size = rows * length
            supervised = int((labels >= 0).sum())
            yield FakeBatch(micro, supervised, size - 1, size, {"batch": number})

    return batches


class Bytewise:
    """A vocabulary of one id per byte, after the end-of-text id; others are unused."""

    end_of_text = start = 0

    def used_ids(self) -> np.ndarray:
        return np.arange(257, dtype=np.int32)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([byte + 1 for byte in text.encode()], np.int32) for text in texts]

    def stream(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda index: decoder.decode(bytes([index - 1]))


@pytest.fixture(scope="session")
def bytewise() -> Bytewise:
    return Bytewise()


@pytest.fixture(scope="session")
def sure_of() -> Callable[[bytes], BigramTrainer]:
    """Return a factory of models that predict the next byte with certainty: each byte of a text occurs once."""

    def model(text: bytes) -> BigramTrainer:
        trainer = BigramTrainer(vocab=300)
        trainer.table[:] = -50.0
        trainer.table[:, 299] = 1e6  # an unused row of the embedding
        ids = [0, *(byte + 1 for byte in text), 0]
        trainer.table[ids[:-1], ids[1:]] = 50.0
        return trainer

    return model


@pytest.fixture
def counter() -> Counter[str]:
    return Counter()
