"""kill -9 of one of several ranks at random moments, resumes, and an end equal to an undisturbed run's.

    python -m benchmarks.rank_kills --same 40 --mixed 20 --stopped 6 [--sizes 2,4] [--shard weights] [--seed S]

A trial is a run of 24 steps on a CPU over gloo, with a checkpoint every 4 steps. A random rank
is killed, the others are ended as by torchrun, and the run is resumed; once, twice or three
times, then to its end. A kill is at a moment that is uniform over the run, including start-up and
tokenisation; or, every other time, in a save: before the k-th access to the checkpoints by the rank itself, or
within the time of a save, counted from the creation of its temporary folder.

same     every start has the same number of ranks, and the end must be bitwise equal to an undisturbed run
         with it: arrays, scalars, losses
mixed    each start has its own number of ranks, 1 included: losses and evaluations must be within 1e-5,
         and steps, tokens and the position in the data equal
stopped  a rank is stopped (SIGSTOP), another must name it, and the run is resumed, bitwise equal

After each kill every checkpoint must verify, each one recorded in metrics.jsonl must exist, and each
step must be in metrics.jsonl once with its loss; the next start must resume from the newest checkpoint. No rank
may report the end of another as a defect.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import (
    MEASURED,
    broken,
    differences,
    events,
    newest_step,
    of_checkpoints,
    state,
)
from benchmarks.trials.forked import import_all, modules_of
from benchmarks.trials.ranked import Group, RankedRun
from benchmarks.trials.reference import watch_checkpoints
from benchmarks.trials.tiny_run import STEPS
from minillm_core.checkpoint.read import Checkpoint

NEAR = 1e-5  # of a loss, at another number of ranks
LIVES = (1, 1, 2, 3)  # numbers of kills in a trial, one drawn
DEFECT = "a defect in minillm"  # the program's wording for an unknown error
ATTEMPTS = 20  # to kill a run before it ends
SETTINGS = ("train.accumulate=4", "--deterministic")  # a step that 4 ranks can divide


@dataclass(frozen=True)
class Known:
    """The undisturbed runs, by their number of ranks."""

    run: RankedRun
    outs: Mapping[int, Path]
    seconds: Mapping[int, float]
    touches: int  # accesses to the checkpoints by rank 0
    of_others: int  # by each other rank, if all write
    saves: int
    save_seconds: float


@dataclass(frozen=True)
class Trial:
    """One run to be disturbed."""

    mode: str  # same, mixed or stopped
    known: Known
    number: int
    size: int  # number of ranks; mixed: the maximum
    seed: int

    @property
    def name(self) -> str:
        """Its name for --only."""
        return f"{self.mode}-{self.size}-{self.number}"


@dataclass
class Outcome:
    """The result of a trial."""

    facts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds from a kill to the end of the last rank
    wrong: list[str] = field(default_factory=list)


def survive(trial: Trial) -> Outcome:
    """Disturb, resume, compare."""
    rng = random.Random(f"{trial.seed} {trial.name}")
    run, outcome = trial.known.run, Outcome()
    out = run.folder / trial.name
    try:
        (_stop if trial.mode == "stopped" else _kill_some)(trial, out, rng, outcome)
        size = _size(trial, rng, alone=True)
        before, said = newest_step(out), len(run.said(out))
        codes = run.launch(out, size, resume=True).end()
        if any(codes):
            outcome.wrong.append(f"the last resume ended with {codes}")
        else:
            outcome.wrong += _resumed_there(run.said(out)[said:], before, to_the_end=True)
            exact = trial.mode != "mixed"
            compared = differences if exact else nearly
            outcome.wrong += compared(trial.known.outs[trial.size if exact else size], out)
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    run.tidy(out, keep=bool(outcome.wrong))
    return outcome


def _size(trial: Trial, rng: random.Random, *, alone: bool = False) -> int:
    if trial.mode != "mixed":
        return trial.size
    return rng.choice([size for size in trial.known.outs if size > 1 or alone])


def _kill_some(trial: Trial, out: Path, rng: random.Random, outcome: Outcome) -> None:
    known, wanted, late = trial.known, rng.choice(LIVES), 0
    while outcome.facts["kills"] < wanted:
        if late > ATTEMPTS:
            raise RuntimeError(f"it ended {ATTEMPTS} times before its kill")
        resume, size = outcome.facts["kills"] > 0, _size(trial, rng)
        before, said = newest_step(out), len(known.run.said(out))
        how = rng.choice((at_any_time, at_any_time, at_a_touch, at_a_moment))
        victim, group = how(known, out, size, resume, rng)
        killed = time.perf_counter()
        codes = group.end()
        if codes[victim] == -signal.SIGKILL:
            seconds = time.perf_counter() - killed
            outcome.slowest = max(outcome.slowest, seconds)
            outcome.facts.update(["kills", f"of {size}", "rank 0" if victim == 0 else "others"])
            outcome.facts["in a save"] += how is not at_any_time
            outcome.facts[state(out)] += 1
            outcome.facts["ended by SIGKILL"] += codes.count(-signal.SIGKILL) - 1
            outcome.wrong += broken(out) + list(_steps(known.outs[size], out))
            fresh = known.run.said(out)[said:]
            outcome.wrong += _resumed_there(fresh, before, to_the_end=False)
            if DEFECT in fresh:
                outcome.wrong.append("a rank that lost another one calls it a defect")
        elif any(codes):
            raise RuntimeError(f"a run that should have been killed ended with {codes}")
        elif resume:
            return
        else:
            late += 1
            outcome.facts["ended before"] += 1
            known.run.tidy(out, keep=False)


def at_any_time(
    known: Known, out: Path, size: int, resume: bool, rng: random.Random
) -> tuple[int, Group]:
    """Kill a rank at a moment that is uniform over a run; a resumed run may end earlier."""
    victim, moment = rng.randrange(size), rng.uniform(0, known.seconds[size] * 1.05)
    group = known.run.launch(out, size, resume=resume)
    group.wait_until(moment)
    _kill(group, victim)
    return victim, group


def at_a_touch(
    known: Known, out: Path, size: int, resume: bool, rng: random.Random
) -> tuple[int, Group]:
    """Let a rank kill itself before its k-th access to the checkpoints."""
    victim = rng.randrange(size)
    k = rng.randint(1, known.touches if victim == 0 else known.of_others)

    def die(number: int) -> None:
        if number == k:
            os.kill(os.getpid(), signal.SIGKILL)

    def first(rank: int) -> None:
        if rank == victim:
            watch_checkpoints(out, die)

    return victim, known.run.launch(out, size, resume=resume, first=first)


def at_a_moment(
    known: Known, out: Path, size: int, resume: bool, rng: random.Random
) -> tuple[int, Group]:
    """Kill a rank within the time of a save, counted from the j-th new temporary folder."""
    victim, j = rng.randrange(size), rng.randint(1, known.saves)
    delay, seen = rng.uniform(0, 2 * known.save_seconds), set(_temporary(out))
    before, group = len(seen), known.run.launch(out, size, resume=resume)
    while None in group.poll() and not any(group.poll()):
        seen.update(_temporary(out))
        if len(seen) >= before + j:
            time.sleep(delay)
            _kill(group, victim)
            break
        time.sleep(0.0005)
    return victim, group


def _kill(group: Group, victim: int) -> None:
    if group.ranks[victim].poll() is None:
        os.kill(group.ranks[victim].pid, signal.SIGKILL)


def _temporary(out: Path) -> list[str]:
    try:
        return [name for name in os.listdir(out / "checkpoints") if ".tmp-" in name]
    except FileNotFoundError:
        return []


def _stop(trial: Trial, out: Path, rng: random.Random, outcome: Outcome) -> None:
    """Stop a rank between its first step and its last, and wait until another one names it."""
    group = trial.known.run.launch(out, trial.size)
    after, victim = rng.randrange(1, STEPS // 2), rng.randrange(trial.size)
    while len(events(out, "step")) < after:
        if any(one is not None for one in group.poll()):
            raise RuntimeError(f"it ended before a rank was stopped: {group.poll()}")
        time.sleep(0.001)
    os.kill(group.ranks[victim].pid, signal.SIGSTOP)
    began = time.perf_counter()
    codes = group.end()
    outcome.facts["stops"] += 1
    others = [code for rank, code in enumerate(codes) if rank != victim]
    outcome.slowest = time.perf_counter() - began
    if 1 not in others:
        outcome.wrong.append(f"rank {victim} was stopped, and they ended with {codes}")
    if f": rank {victim} has not answered for" not in trial.known.run.said(out):
        outcome.wrong.append(f"rank {victim} was stopped, and is not named")
    outcome.wrong += broken(out) + list(_steps(trial.known.outs[trial.size], out))


def _steps(reference: Path, out: Path) -> Iterator[str]:
    """Check the steps in metrics.jsonl so far: each once, in order, with its loss."""
    wanted = {event["step"]: event["loss"] for event in events(reference, "step")}
    found = [(event["step"], event["loss"]) for event in events(out, "step")]
    if [step for step, _ in found] != list(range(1, len(found) + 1)):
        yield f"metrics.jsonl: steps {[step for step, _ in found]}"
    for step, loss in found:
        if abs(loss - wanted[step]) > NEAR:
            yield f"metrics.jsonl: the loss of step {step} is {loss}, not {wanted[step]}"


def _resumed_there(said: str, newest: int, *, to_the_end: bool) -> Iterator[str]:
    """Check the checkpoint that a start reported to resume from; a killed one may not have reported it yet."""
    came = f"resumed after step {newest} from" in said
    came |= newest == STEPS and "is finished" in said
    if newest and not came and (to_the_end or "resumed after" in said):
        yield f"the newest checkpoint was that of step {newest}, and it was not resumed from it"


def nearly(reference: Path, out: Path) -> list[str]:
    """List differences of a run with other numbers of ranks: everything but the last digits of its losses."""
    return [
        *_checkpoints_nearly(reference, out),
        *_events_nearly(reference, out, "step", {"loss", "grad_norm", "terms"}),
        *_events_nearly(reference, out, "eval", {"val_loss", "bits_per_byte"}),
        *(f"left over: {path.name}" for path in out.rglob("*.tmp-*")),
    ]


def _checkpoints_nearly(reference: Path, out: Path) -> Iterator[str]:

    def of_pair(wanted: Checkpoint, found: Checkpoint) -> Iterator[str]:
        for key in ("step", "tokens", "cursor", "skipped", "seed", "plan_hash", "fingerprint"):
            a, b = (one.scalars.get(key) for one in (wanted, found))
            if a != b:
                yield f"{key} is {b}, not {a}"

    return of_checkpoints(reference, out, of_pair)


def _events_nearly(reference: Path, out: Path, name: str, near: set[str]) -> Iterator[str]:
    wanted, found = events(reference, name), events(out, name)
    numbers = [[event["step"] for event in each] for each in (wanted, found)]
    if numbers[0] != numbers[1]:
        yield f"metrics.jsonl: {name} events of steps {numbers[1]}"
        return
    for a, b in zip(wanted, found, strict=True):
        exact = a.keys() - near - MEASURED
        if any(a[key] != b.get(key) for key in exact):
            yield f"metrics.jsonl: {b} instead of {a}"
        for key in near & a.keys():
            if isinstance(a[key], float) and abs(a[key] - b[key]) > NEAR * max(1.0, abs(a[key])):
                yield f"metrics.jsonl: {name} {a['step']}: {key} is {b[key]}, not {a[key]}"


def undisturbed(run: RankedRun, sizes: list[int]) -> Known:
    """Run each number of ranks to its end; the first run is cold, and this process repeats its imports.

    Raises:
        RuntimeError: one failed, or two with the same number differ.
    """
    modules = run.folder / "modules.json"
    touches = [run.folder / f"touches-{rank}.txt" for rank in range(2)]
    for file in touches:
        file.write_text("1")
    scout = run.folder / "scout"
    child = run.start(scout, last=partial(modules_of, modules))
    if child.wait():
        raise RuntimeError(f"an undisturbed run failed:\n{run.said(scout)}")
    ranked = ("minillm_mesh.torch_ranks", "minillm_mesh.torch_weights", "torch.distributed")
    import_all([*json.loads(modules.read_text()), *ranked])
    outs, seconds = {1: run.folder / "whole-1"}, {}
    sizes = sorted({1, *sizes})

    def first(out: Path, rank: int) -> None:
        if rank < 2:
            watch_checkpoints(out, lambda number: touches[rank].write_text(str(number)) and None)

    for size in sizes:
        for again in (False, True):
            out = run.folder / (f"again-{size}" if again else f"whole-{size}")
            began = time.perf_counter()
            codes = run.launch(out, size, first=partial(first, out)).end()
            if any(codes):
                raise RuntimeError(f"an undisturbed run ended with {codes}:\n{run.said(out)}")
            seconds[size] = time.perf_counter() - began
            if again and (different := differences(outs[size], out)):
                raise RuntimeError(f"two undisturbed runs of {size} differ: {different[0]}")
            outs.setdefault(size, out)
        if size > 1 and (apart := nearly(outs[1], outs[size])):
            raise RuntimeError(f"runs of 1 and of {size} differ: {apart[0]}")
    saves = [event["seconds"] for event in events(outs[sizes[-1]], "save")]
    middle = sorted(saves)[len(saves) // 2]
    counted = [int(file.read_text()) for file in touches]
    return Known(run, outs, seconds, *counted, len(saves), middle)


WHAT = {
    "same": "kill -9 of a rank of {}, resumed by as many, torch",
    "mixed": "kill -9 of a rank of 2 or 4, resumed by other numbers, torch",
    "stopped": "SIGSTOP of a rank of {}, torch",
}


def rows(trials: list[Trial], jobs: int) -> list[Row]:
    """Run all trials; return a row for each kind."""
    found: dict[str, Row] = {}
    for trial, outcome in each(survive, trials, jobs):
        what = WHAT[trial.mode].format(trial.size)
        if (shard := trial.known.run.shard) != "auto":
            what += f", mesh.shard={shard}"
        row = found.setdefault(what, Row(what))
        row.tried += 1
        row.detected += not outcome.facts["corrupt"]
        if trial.mode == "mixed":  # bitwise equality is only guaranteed for a fixed number of ranks
            row.count(f"equal within {NEAR:g}", not outcome.wrong)
        else:
            row.ended += 1
            row.bit_equal += not outcome.wrong
        for fact, number in outcome.facts.items():
            row.count(fact, number)
        row.facts["slowest end, s"] = round(
            max(row.facts.get("slowest end, s", 0), outcome.slowest), 1
        )
        if outcome.wrong:
            row.fail(f"--seed {trial.seed} --only {trial.name}", outcome.wrong[:4])
    return [found[what] for what in sorted(found)]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--same", type=int, default=40, help="trials at one number of ranks")
    options.add_argument("--mixed", type=int, default=20, help="trials at changing numbers")
    options.add_argument("--stopped", type=int, default=4, help="trials with a stopped rank")
    options.add_argument("--sizes", default="2,4", help="numbers of ranks")
    options.add_argument("--plugins", default="muon", help="as for minillm train")
    options.add_argument(
        "--shard", choices=("auto", "weights"), default="auto", help="what several ranks divide"
    )
    options.add_argument("--only", help="one trial by its name, such as same-2-7")
    given = options.parse_args()
    sizes = [int(one) for one in given.sizes.split(",")]
    with workshop(given) as folder:
        run = RankedRun(folder, plugins=given.plugins, settings=SETTINGS, shard=given.shard)
        known = undisturbed(run, sizes)
        print(
            "; ".join(f"{size} ranks: {known.seconds[size]:.2f} s a run" for size in sizes)
            + f"; {known.saves} saves of {1000 * known.save_seconds:.0f} ms, {known.touches} touches",
            flush=True,
        )
        trials = [
            Trial(
                mode, known, n, max(sizes) if mode == "mixed" else sizes[n % len(sizes)], given.seed
            )
            for mode in WHAT
            for n in range(getattr(given, mode))
        ]
        if given.only:
            trials = [trial for trial in trials if trial.name == given.only]
        name = "rank_kills" if given.shard == "auto" else f"rank_kills_{given.shard}"
        return finish(name, rows(trials, given.jobs), given, plugins=given.plugins)


if __name__ == "__main__":
    raise SystemExit(main())
