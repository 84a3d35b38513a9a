"""Tests of turns: equal steps for every variant, separate memory, and tolerance of a failure."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.turns import Memory, ratio, take_turns


class Heap(Memory):
    """A memory that counts bytes declared by the variants."""

    def __init__(self) -> None:
        self.allocated = self.most = 0

    def now(self) -> int:
        return self.allocated

    def reset(self) -> None:
        self.most = self.allocated

    def peak(self) -> int:
        return self.most


class Fake:
    """A variant that holds some bytes permanently, and more during a step."""

    multiplied = 10

    def __init__(self, heap: Heap, held: int, working: int, fails_at: int | None = None) -> None:
        self.heap, self.working, self.fails_at = heap, working, fails_at
        self.steps = 0
        self.closed = False
        heap.allocated += held

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("out of everything")
        self.heap.most = max(self.heap.most, self.heap.allocated + self.working)

    def read(self) -> float:
        return 1.0 / self.steps

    def close(self) -> None:
        self.closed = True

    def facts(self) -> dict[str, Any]:
        return {"of": "a fake"}


@pytest.fixture
def heap() -> Heap:
    return Heap()


def run(variants: dict[str, Any], heap: Heap, **settings: Any) -> Any:
    makers = {name: lambda make=make: (make(), 100) for name, make in variants.items()}
    said: list[str] = []
    (*_, turns) = take_turns(makers, heap, say=said.append, **settings)
    return turns, said


def test_everyone_takes_the_same_turns(heap: Heap) -> None:
    both = {"a": lambda: Fake(heap, 5, 50), "b": lambda: Fake(heap, 7, 20)}
    turns, _ = run(both, heap, steps=4, repeats=3, warm=2)
    for one in turns.measured.values():
        assert [len(turn) for turn in one.seconds] == [4, 4, 4]
        assert one.variant.steps == 2 + 3 * (1 + 4)
        assert len(one.losses) == 3


def test_a_peak_is_the_variants_own(heap: Heap) -> None:
    both = {"a": lambda: Fake(heap, 5, 50), "b": lambda: Fake(heap, 7, 20)}
    turns, _ = run(both, heap, steps=2, repeats=2)
    a, b = turns.measured["a"], turns.measured["b"]
    assert (a.held, a.peak, b.held, b.peak) == (5, 55, 7, 27)
    assert ratio(a, b)["peak_bytes"] == round(55 / 27, 4)


def test_steps_timed_as_one_are_taken_all(heap: Heap) -> None:
    turns, _ = run({"a": lambda: Fake(heap, 1, 1)}, heap, steps=6, repeats=2, together=3, warm=3)
    one = turns.measured["a"]
    assert [len(turn) for turn in one.seconds] == [2, 2]
    assert one.variant.steps == 3 + 2 * (3 + 6)


@pytest.mark.parametrize("fails_at", [1, 2, 8])
def test_one_that_fails_is_dropped_and_told(heap: Heap, fails_at: int) -> None:
    both = {"bad": lambda: Fake(heap, 5, 50, fails_at), "good": lambda: Fake(heap, 7, 20)}
    turns, said = run(both, heap, steps=3, repeats=2)
    assert list(turns.measured) == ["good"]
    assert "out of everything" in turns.failed["bad"]
    assert any("bad FAILED" in line for line in said)
    assert [len(turn) for turn in turns.measured["good"].seconds] == [3, 3]


def test_figures_count_speed_and_flops(heap: Heap) -> None:
    turns, _ = run({"a": lambda: Fake(heap, 1, 1)}, heap, steps=1, repeats=3)
    one = turns.measured["a"]
    one.seconds = [[0.5], [0.25], [0.1]]
    figures = one.figures(attention=5, peak_flops=1e6)
    assert figures["tokens_per_second"] == 400
    assert figures["tokens_per_second_by_turn"] == [200, 400, 1000]
    assert figures["flops_per_token"] == 6 * 10 + 12 * 5
    assert figures["mfu"] == pytest.approx(400 * 120 / 1e6)
    assert one.figures(attention=5, peak_flops=None)["mfu"] is None
