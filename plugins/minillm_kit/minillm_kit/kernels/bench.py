"""Kernels of an op timed in turns (A B A B), beside the limits of the machine, measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm_core import MinillmError, Request
from minillm_core.commands import plain
from minillm_kit.kernels.calls import Calls, Timed, loaded
from minillm_kit.kernels.offers import Offer
from minillm_kit.kernels.workloads import WORKLOADS, Sizes, Work

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
TURN = 0.05
"""Target seconds of a turn, which set its number of calls."""

MOST = 200
"""Maximum number of calls in a turn."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Limits:
    """The measured peak of a machine: a product of two large matrices, and a copy."""

    flops: float  # a second
    bytes: float  # read and written, a second

    def data(self) -> dict[str, float]:
        """Return the limits as a JSON object."""
        return {"flops_per_second": self.flops, "bytes_per_second": self.bytes}

    def least_seconds(self, work: Work, itemsize: int) -> tuple[float, str]:
        """Return the roofline time of a work in seconds, and the binding limit."""
        by_flops, by_bytes = work.flops / self.flops, work.numbers * itemsize / self.bytes
        return (by_flops, "FLOPs") if by_flops > by_bytes else (by_bytes, "bytes")


@dataclass
class Entrant:
    """A kernel under measurement, and its results so far."""

    offer: Offer
    forward: Timed
    both: Timed | None  # forward and backward
    times: dict[str, list[float]] = field(default_factory=dict)  # pass -> seconds, one per turn
    extra: dict[str, int | None] = field(default_factory=dict)  # pass -> bytes beside the arguments

    @property
    def passes(self) -> dict[str, Timed]:
        """The timed passes, by name."""
        return {"forward": self.forward} | ({"both": self.both} if self.both else {})


def limits(calls: Calls, dtype: str) -> Limits:
    """Measure a machine's limits: the fastest of five runs."""
    small = calls.kind == "cpu"
    n, size = (512, 2**26) if small else (8192, 2**30)
    product, copy = calls.product(n, dtype), calls.copy(size)
    times = []
    for one in (product, copy):
        one.seconds(2)
        times.append(min(one.seconds(2 if small else 10) for _ in range(5)))
    return Limits(2 * n**3 / times[0], 2 * size / times[1])


def bench(
    offers: Sequence[Offer],
    calls: Calls,
    dtype: str,
    sizes: Sizes,
    measure: Callable[[], Limits],
    *,
    repeats: int,
    say: Say,
) -> dict[str, Any]:
    """Time the kernels of one op against each other.

    Args:
        offers: kernels of one op, in the order of the table.
        calls: of the device to time on.
        dtype: the compute dtype.
        sizes: of the workload.
        measure: returns the machine's limits; called if a kernel supports the workload.
        repeats: turns of each kernel.
        say: prints a line.

    Returns:
        The results, as JSON; ratios are to the first supported kernel. A kernel that raises is left
        out, with its exception.

    Raises:
        MinillmError: a kernel cannot be imported.
        MemoryError: the arguments do not fit into memory.
    """
    op = offers[0].candidate.op
    load = WORKLOADS[op]
    try:
        example = load.arguments(np.random.default_rng(0), sizes)
    except ValueError as error:  # more numbers than NumPy can address
        raise MemoryError(str(error)) from error
    request = Request(op, calls.backend, calls.kind, dtype, facts=example.facts)
    refused = {
        one.candidate.name: why for one in offers if (why := one.refusal(request)) is not None
    }
    entrants, failed, raised = [], {}, {}
    for one in offers:
        if one.candidate.name in refused:
            continue
        try:
            entrants.append(_entrant(one, calls, dtype, example, learns=load.backward is not None))
        except MinillmError:
            raise  # names the plugin's line
        except (Exception, SystemExit) as error:
            if calls.out_of_memory(error):
                failed[one.candidate.name] = "the device has no memory for it"
            else:
                raised[one.candidate.name] = plain(f"{type(error).__name__}: {error}", 300)
    found = {
        "op": op,
        "backend": calls.backend,
        "device": calls.device,
        "dtype": dtype,
        "sizes": dict(sizes),
        "repeats": repeats,
        "refused": refused | failed,
        "raised": raised,
    }
    if not entrants:
        return found | {"limits": None, "work": {}, "kernels": []}
    known = measure()
    counts = {name: _calls_a_turn(timed) for name, timed in entrants[0].passes.items()}
    for turn in range(repeats):
        for one in entrants:
            for name, timed in one.passes.items():
                one.times.setdefault(name, []).append(timed.seconds(counts[name]))
        spent = (f"{one.offer.candidate.name} {one.times['forward'][-1]:.2e} s" for one in entrants)
        say(f"{op} on {calls.backend}, turn {turn + 1}: forward {', '.join(spent)}")
    forward = load.forward(sizes)
    works = {"forward": forward}
    if load.backward is not None:
        works["both"] = Work(*map(sum, zip(forward, load.backward(sizes), strict=True)))
    return found | {
        "limits": known.data(),
        "calls_a_turn": counts,
        "work": {name: _work(work, known, dtype) for name, work in works.items()},
        "kernels": [_figures(one, entrants[0], works, known, dtype) for one in entrants],
    }


def _work(work: Work, known: Limits, dtype: str) -> dict[str, Any]:
    seconds, bound = known.least_seconds(work, ITEMSIZE[dtype])
    return {
        "flops": work.flops,
        "bytes": work.numbers * ITEMSIZE[dtype],
        "least_seconds": seconds,
        "bound_by": bound,
    }


def _entrant(offer: Offer, calls: Calls, dtype: str, example: Any, *, learns: bool) -> Entrant:
    kernel, given = loaded(offer.candidate), {**example.floats, **example.others}
    floats = [*example.floats]
    forward = calls.timed(kernel, given, floats, dtype=dtype)
    both = calls.timed(kernel, given, floats, dtype=dtype, wanted=floats) if learns else None
    one = Entrant(offer, forward, both)
    for name, timed in one.passes.items():
        timed.seconds(2)  # warm-up: compiles, and allocates all memory
        one.extra[name] = timed.extra_bytes()
    return one


def _calls_a_turn(timed: Timed) -> int:
    return max(1, min(MOST, round(TURN / max(timed.seconds(1), 1e-7))))


def _figures(
    one: Entrant, first: Entrant, works: Mapping[str, Work], known: Limits, dtype: str
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kernel": one.offer.candidate.name,
        "provider": one.offer.candidate.provider,
        "within_tolerance": one.offer.candidate.within_tolerance,
    }
    for name, times in one.times.items():
        seconds = statistics.median(times)
        work, itemsize = works[name], ITEMSIZE[dtype]
        ratios = [x / y for x, y in zip(first.times[name], times, strict=True)]
        found[name] = {
            "seconds": seconds,
            "low": min(times),
            "high": max(times),
            "seconds_by_turn": times,
            "flops_per_second": work.flops / seconds,
            "bytes_per_second": work.numbers * itemsize / seconds,
            "share_of_limit": known.least_seconds(work, itemsize)[0] / seconds,
            "speed_to_first": statistics.median(ratios),
            "speed_to_first_low": min(ratios),
            "speed_to_first_high": max(ratios),
            "extra_bytes": one.extra[name],
        }
    return found
