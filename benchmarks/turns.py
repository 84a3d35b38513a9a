"""Variants measured in turns (A B A B) in one process: step times, memory, ratios.

A step is timed with the device idle before and after it, or several that are enqueued together. A
variant's peak memory is the maximum allocated during its own steps, minus the memory that the other
variants hold between theirs.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["PEAK_FLOPS", "Measured", "Memory", "Turns", "Variant", "ratio", "take_turns"]

PEAK_FLOPS = 989e12  # dense bfloat16, of an H100 or H200 (SXM), by the datasheet


class Variant(Protocol):
    """A trainer under measurement."""

    @property
    def multiplied(self) -> int:
        """Return the number of parameters in products."""
        ...

    def step(self) -> None:
        """Make one optimizer step; need not synchronise with the device."""

    def read(self) -> float:
        """Return the last step's loss; synchronises."""
        ...

    def close(self) -> None:
        """End its threads."""

    def facts(self) -> dict[str, Any]:
        """Describe the variant, as JSON."""
        ...


class Memory:
    """A device's memory in bytes, and its queue; here a CPU, where nothing is counted."""

    def wait(self) -> None:
        """Wait until the device is idle."""

    def now(self) -> int:
        """Return the bytes allocated now."""
        return 0

    def reset(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """Return the peak since the reset."""
        return 0

    def trim(self) -> None:
        """Free cached memory."""


@dataclass
class Measured:
    """One variant and its figures so far."""

    name: str
    variant: Variant
    tokens: int  # per step
    first_step_seconds: float  # including compilation
    held: int = 0  # bytes between steps
    peak: int = 0
    seconds: list[list[float]] = field(default_factory=list)  # [turn][step]
    losses: list[float] = field(default_factory=list)  # after each turn

    @property
    def steps(self) -> list[float]:
        """Return the seconds of every timed step."""
        return [second for turn in self.seconds for second in turn]

    def figures(self, attention: int, peak_flops: float | None) -> dict[str, Any]:
        """Return the figures as JSON; ``attention`` is layers x heads x head_dim x T."""
        speed = self.tokens / statistics.median(self.steps)
        flops = 6 * self.variant.multiplied + 12 * attention
        return {
            **self.variant.facts(),
            "tokens_per_step": self.tokens,
            "tokens_per_second": round(speed),
            "tokens_per_second_by_turn": [
                round(self.tokens / statistics.median(turn)) for turn in self.seconds
            ],
            "multiplied_parameters": self.variant.multiplied,
            "flops_per_token": flops,
            "mfu": round(speed * flops / peak_flops, 4) if peak_flops else None,
            "peak_bytes": self.peak,
            "held_bytes": self.held,
            "first_step_seconds": round(self.first_step_seconds, 2),
            "step_seconds": [[round(second, 5) for second in turn] for turn in self.seconds],
            "loss_by_turn": [round(loss, 4) for loss in self.losses],
        }


def take_turns(
    makers: Mapping[str, Callable[[], tuple[Variant, int]]],
    memory: Memory,
    *,
    steps: int,
    repeats: int,
    say: Callable[[str], None],
    together: int = 1,
    warm: int = 3,
) -> Iterator[Turns]:
    """Build and warm up every variant; then all take turns, ``repeats`` times.

    Args:
        makers: name -> factory of the variant, with the tokens of its step.
        memory: of the device.
        steps: timed, per turn; ``together`` more before them are not.
        repeats: turns of each.
        say: prints a line.
        together: steps that are enqueued without synchronisation, and timed as one.
        warm: untimed warm-up steps after building; the first compiles.

    Yields:
        After every round: the figures so far. The variants are not closed; the caller does that.
        A variant that raises is dropped, and its error is among the figures.
    """
    turns = Turns()
    for name, make in makers.items():
        with turns.dropping(name, say):
            turns.measured[name] = _built(name, make, memory, warm)
            first = turns.measured[name].first_step_seconds
            say(f"{name}: built, first step after {first:.1f} s")
    for turn in range(repeats):
        for name, one in list(turns.measured.items()):
            with turns.dropping(name, say):
                _turn(one, memory, steps, together)
                rate = one.tokens / statistics.median(one.seconds[-1])
                say(
                    f"turn {turn + 1} {name}: {rate:,.0f} tokens/s, "
                    f"peak {one.peak / 2**30:.2f} GiB, loss {one.losses[-1]:.3f}"
                )
        yield turns


@dataclass
class Turns:
    """The measured variants, and the reasons why the others are missing."""

    measured: dict[str, Measured] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def dropping(self, name: str, say: Callable[[str], None]) -> Iterator[None]:
        """Drop a variant that raises: the others are still measured."""
        try:
            yield
        except Exception:
            self.failed[name] = traceback.format_exc()[-4000:]
            if (one := self.measured.pop(name, None)) is not None:
                one.variant.close()
            say(f"{name} FAILED\n{self.failed[name]}")


def _built(
    name: str, make: Callable[[], tuple[Variant, int]], memory: Memory, warm: int
) -> Measured:
    _settle(memory)
    before = memory.now()
    began = time.perf_counter()
    variant, tokens = make()
    _timed(variant, memory, 1)
    one = Measured(name, variant, tokens, time.perf_counter() - began)
    _timed(variant, memory, warm - 1)
    variant.read()
    _settle(memory)
    one.held = memory.now() - before
    return one


def ratio(a: Measured, b: Measured) -> dict[str, Any]:
    """Compute speed and memory of ``a`` relative to ``b``: of all steps' medians, and turn by turn."""

    def compared(a_steps: list[float], b_steps: list[float]) -> float:
        speeds = [a.tokens / statistics.median(a_steps), b.tokens / statistics.median(b_steps)]
        return round(speeds[0] / speeds[1], 4)

    return {
        "tokens_per_second": compared(a.steps, b.steps),
        "tokens_per_second_by_turn": [
            compared(*turn) for turn in zip(a.seconds, b.seconds, strict=True)
        ],
        "peak_bytes": round(a.peak / b.peak, 4) if b.peak else None,
    }


def _turn(one: Measured, memory: Memory, steps: int, together: int) -> None:
    _settle(memory)
    others = memory.now() - one.held
    _timed(one.variant, memory, together)  # reallocates the memory that was freed
    memory.reset()
    one.seconds.append(
        [_timed(one.variant, memory, together) for _ in range(max(1, steps // together))]
    )
    one.peak = max(one.peak, memory.peak() - others)
    one.losses.append(one.variant.read())


def _timed(variant: Variant, memory: Memory, steps: int) -> float:
    """Measure seconds per step."""
    memory.wait()
    began = time.perf_counter()
    for _ in range(steps):
        variant.step()
    memory.wait()
    return (time.perf_counter() - began) / max(1, steps)


def _settle(memory: Memory) -> None:
    memory.wait()
    gc.collect()
    memory.trim()
