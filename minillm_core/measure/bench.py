"""The whole job of ``minillm bench``: sets of plugins in one process, stepped in turns (A B A B)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core import backends
from minillm_core.backends.detect import Detected
from minillm_core.backends.profiling import profiler_of
from minillm_core.data import open_corpus
from minillm_core.errors import Refusal
from minillm_core.measure.contest import Contender, Contest, Create, Profile, eager
from minillm_core.plan import build_plan
from minillm_core.plugins.manager import check_support
from minillm_core.train.record import hardware, versions

__all__ = ["Request", "bench"]


@dataclass(frozen=True)
class Request:
    """What is to be found out."""

    steps: int = 10  # timed together, a turn
    repeats: int = 5  # turns of each set
    layers: bool = False
    trace: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            Refusal: fewer than one step or turn, or a trace that cannot be written.
        """
        for flag, count in (("--steps", self.steps), ("--repeats", self.repeats)):
            if count < 1:
                raise Refusal("nothing would be timed", where=f"{flag} {count}", fix=f"{flag} 5")
        if self.trace is not None and not self.trace.parent.is_dir():
            raise Refusal(
                f"{self.trace.parent} is not a folder",
                where=f"--trace {self.trace}",
                fix="name a file in a folder that is there",
            )


def bench(
    request: Request,
    contenders: Sequence[Contender],
    detected: Detected,
    *,
    cache: Path,
    say: Callable[[str], None],
    create: Create | None = None,
    profile: Profile = profiler_of,
) -> dict[str, Any]:
    """Time one set of plugins, or two against each other.

    Args:
        request: how long, and what else.
        contenders: one or two; the second is what the first is compared with.
        detected: backend and device.
        cache: where tokens are kept.
        say: prints a line.
        create: makes the backend; default: :func:`minillm_core.backends.create`.
        profile: makes a trainer's profiler.

    Returns:
        The document that ``--json`` prints; see :meth:`Contest.figures`.

    Raises:
        Refusal: nothing was started.
        MinillmError: a plugin's own code raised, or the framework cannot tell what is asked for.
    """
    request.check()
    for one in contenders:
        check_support(one.plugins, detected.backend, detected.device)
    plans = [build_plan(one.loaded.config, one.plugins) for one in contenders]
    for plan in plans:  # a kernel that cannot serve is to be told now
        backends.bind(detected, plan)
        if request.layers or request.trace:
            backends.bind(detected, eager(plan))
    config = contenders[0].loaded.config
    corpus = open_corpus(
        config.data, config.model.vocab, config.train.seq_len, cache=cache, say=say
    )
    make = create or backends.create
    with ExitStack() as stack:
        contests: list[Contest] = []
        held = 0
        for one, plan in zip(contenders, plans, strict=True):
            contest = Contest(one, plan, corpus, detected, make, profile)
            stack.enter_context(contest.stepped)
            contest.profiler.check(layers=request.layers, trace=request.trace is not None)
            contests.append(contest)
            contest.warm()
            gc.collect()  # what compiling left behind is nobody's
            now = contest.profiler.held_bytes() or 0
            contest.held, held = now - held, now
            say(f"{one.name}: built and warm, the first step after {contest.first:.1f} s")
        for turn in range(request.repeats):
            for contest in contests:
                contest.turn(request.steps, others=held - contest.held)
                say(f"turn {turn + 1} {contest.name}: {contest.speeds[-1]:,.0f} tokens/s")
        if request.layers or request.trace:
            for contest in contests:
                trace = request.trace
                if trace is not None and len(contests) > 1:
                    trace = _beside(trace, contest.name)
                contest.look(layers=request.layers, trace=trace, say=say)
        result = {contest.name: contest.figures() for contest in contests}
        binding = contests[0].stepped.job.trainer.binding
    distributions = [p.distribution for one in contenders for p in one.plugins if p.distribution]
    return {
        "device": binding.device_name,
        "backend": binding.backend,
        "preset": config.preset,
        "steps": request.steps,
        "repeats": request.repeats,
        "data": {"fingerprint": corpus.fingerprint, "description": corpus.description},
        "hardware": hardware(binding.device_name),
        "versions": versions(binding.backend, distributions),
        "sets": result,
        "ratio": _ratio(*result.values()) if len(result) == 2 else None,
    }


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The first over the second: of medians, and the lowest and highest of the turns' pairs."""
    turns = [
        x / y
        for x, y in zip(a["tokens_per_second_by_turn"], b["tokens_per_second_by_turn"], strict=True)
    ]
    peaks = a["peak_bytes"], b["peak_bytes"]
    return {
        "tokens_per_second": a["tokens_per_second"] / b["tokens_per_second"],
        "low": min(turns),
        "high": max(turns),
        "peak_bytes": peaks[0] / peaks[1] if all(peaks) else None,
    }


def _beside(path: Path, name: str) -> Path:
    """trace.json -> trace-muon.json."""
    return path.with_name(f"{path.stem}-{name.replace(' ', '-')}{path.suffix}")
