"""``minillm tune``: find the micro-batch size, checkpointing and kernels of the fastest step on a machine.

The tokens per step are unchanged, so every candidate trains the same model. Tried in this order:

1. rows of a micro-batch: the splits of ``train.rows x train.accumulate`` rows that fit into memory by
   the plan's estimate. Starting at the largest, each candidate has at most half the rows of the previous
   one, until one is clearly slower than the fastest
2. ``train.checkpointing``: with ``true`` a step computes a third more, and with ``selective`` (torch's compiled
   step) writes a little more. So each is only tried if it allows more rows
3. plugins that offer kernels and do nothing else, if they are installed and not named: for the fastest
   candidate, one after the other; those that are faster stay. Kernels outside their dtype's tolerance are
   for those who name them
4. kernels: for the fastest candidate, each op's other kernels, one at a time

One candidate is in memory at a time. It is clearly slower than another where each of its turns is at
least 1 % slower than the other's median. Among candidates not clearly slower than the fastest, the one with the
lowest memory is preferred. It and the original settings are then built and timed twice more each, in the
order A B B A, so that drift of the machine affects both alike; the original settings are kept unless they
are clearly slower.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from minillm_core import Interrupted, MinillmError, OutOfMemory, Plan, Refusal, Stopped
from minillm_core.inspection import find_plugin, installed_plugins, verdicts
from minillm_core.studies import Detected, hardware, sized, versions
from minillm_lab.bench import WARM, refuse_no_time
from minillm_lab.profiling import Profiler, profiler_of
from minillm_lab.study import Study, bind, open_corpus, without_gc

__all__ = ["Candidate", "Request", "kernel_plugins", "tune"]

KERNELS = "kernel_provider"
"""The one hook of a plugin that only offers kernels."""

UNFINISHED = "the tuning is not finished: this is its best candidate so far"
"""A remark in the settings file of a tuning that was ended by a signal."""

CROWDED = 0.92
"""Maximum fraction of memory for an estimate, which excludes the framework's own memory."""

RECOMPUTED = {False: "", "selective": ", recomputed selectively", True: ", recomputed"}
"""Value of ``train.checkpointing`` -> its words, those that recompute less first."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The lengths of a tuning."""

    steps: int = 3  # timed together in one turn
    repeats: int = 3  # turns of each candidate
    memory: float | None = None  # bytes; None: the device's


@dataclass
class Candidate:
    """A configuration of the step, and its measurements."""

    plan: Plan
    predicted: int  # bytes, by the plan's estimate
    reason: str = ""  # for not running it, or not to its end
    kernel: str = ""  # the kernel under trial, as in --kernels
    added: tuple[str, ...] = ()  # plugins of kernels that the run does not name
    speeds: list[float] = field(default_factory=list)  # real tokens per second, one entry per turn
    first: float = 0.0  # seconds of the first step, compilation included
    peak: int | None = None  # bytes; None: the framework does not count
    mfu: float | None = None

    @property
    def speed(self) -> float:
        """Tokens per second, the median of the turns; 0: not run."""
        return median(self.speeds) if self.speeds else 0.0

    def clearly_slower(self, other: Candidate) -> bool:
        """Return whether each turn is at least 1 % slower than the other's median."""
        return max(self.speeds, default=0.0) < 0.99 * other.speed

    @property
    def named(self) -> str:
        """Format the configuration: ``8 x 2 rows, recomputed, attention=flex``."""
        train = self.plan.config.train
        return (
            f"{train.rows} x {train.accumulate} rows"
            + RECOMPUTED[train.checkpointing]
            + "".join(f", with {name}" for name in self.added)
            + f", {self.plan.config.kernels}" * bool(self.kernel)
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings that define the candidate, by key; ``plugins`` only where some are added."""
        train = self.plan.config.train
        names = ("rows", "accumulate", "checkpointing")
        return {
            "kernels": self.plan.config.kernels,
            **{f"train.{name}": getattr(train, name) for name in names},
            **({"plugins": [*self.added]} if self.added else {}),
        }

    def data(self) -> dict[str, Any]:
        """Return the candidate as JSON."""
        return {
            **self.settings(),
            "plugins": [*self.added],
            "kernel": self.kernel or None,
            "predicted_bytes": self.predicted,
            "reason": self.reason or None,
            "tokens_per_second": self.speed or None,
            "tokens_per_second_by_turn": self.speeds,
            "mfu": self.mfu,
            "peak_bytes": self.peak,
            "first_step_seconds": self.first or None,
        }


def tune(
    request: Request,
    plan: Plan,
    detected: Detected,
    *,
    cache: Path,
    say: Say,
    offered: Sequence[str] = (),
    planned: Callable[[Collection[str]], Plan] | None = None,
    create: Callable[[Detected, Plan], Any] | None = None,
    profile: Callable[[Any], Profiler] = profiler_of,
) -> tuple[dict[str, Any], Plan]:
    """Time the candidates of a plan on this machine, and choose one.

    Args:
        request: lengths, and the memory limit.
        plan: of the run; its tokens per step are kept.
        detected: backend and device.
        cache: the token cache.
        say: prints a line.
        offered: plugins of kernels to try, beside those of the plan.
        planned: plans the run with such plugins added; None: they are not tried.
        create: the backend factory; default: the one of ``detected``.
        profile: the profiler factory, called with a trainer.

    Returns:
        The JSON document printed by ``--json``: ``candidates`` in the order of trial, and
        ``best``, the settings of the chosen one by key; and its plan. ``finished`` is False after a signal,
        where the best of the candidates so far is the chosen one.
        ``timed_again``: whether it was timed in turns with the original settings, as ``gain`` then is; the
        candidates' own speeds are of the first pass.

    Raises:
        Refusal: the micro-batches of this plan are fixed, or nothing fits into memory.
        MinillmError: a plugin's code raised, one that the run names.
        KeyboardInterrupt: a signal, before any candidate was timed.
    """
    refuse_no_time(request.steps, request.repeats)
    _refuse_fixed(plan)
    binding = bind(plan, detected)
    corpus = open_corpus(plan.config, cache=cache, say=say, plans=[plan])
    study = Study(corpus, detected, say=say, create=create)
    tuning = Tuning(request, plan, detected, binding.dtype, study, say, profile)
    finished = True
    try:
        tuning.batches()
        if planned is not None:
            tuning.plugins(offered, planned)
        tuning.kernels()
        best, gain = tuning.confirmed()
    except KeyboardInterrupt:
        if not any(one.speeds for one in tuning.candidates):
            raise
        best, gain, finished = tuning.best(), None, False
    document = {
        "device": binding.device_name,
        "backend": binding.backend,
        "preset": plan.config.preset,
        "memory_bytes": tuning.memory,
        "tokens_per_step": best.plan.config.train.rows
        * best.plan.config.train.accumulate
        * plan.config.train.seq_len,
        "steps": request.steps,
        "repeats": request.repeats,
        "candidates": [one.data() for one in tuning.candidates],
        "best": best.settings(),
        "as_they_were": tuning.given.settings(),
        "gain": gain,
        "timed_again": tuning.timed_again,
        "finished": finished,
        "hardware": hardware(binding.device_name),
        "versions": versions(
            binding.backend, [one.distribution for one in plan.active if one.distribution]
        ),
    }
    return document, best.plan


def kernel_plugins(named: Collection[str]) -> Iterator[str]:
    """Yield the installed plugins that offer kernels and do nothing else, except those in ``named``.

    A plugin is imported only if its source mentions the hook. One that cannot be imported is left out:
    ``minillm plugins list`` says why.
    """
    for entry in installed_plugins():
        if entry.name in named or entry.broken or not entry.file:
            continue
        try:
            mentions = KERNELS in Path(entry.file).read_text("utf-8", errors="replace")
            if mentions and find_plugin(entry.name).cls.hooks == (KERNELS,):
                yield entry.name
        except (OSError, MinillmError):
            continue


def _refuse_fixed(plan: Plan) -> None:
    """Check that the split into micro-batches does not affect what the plan trains.

    Raises:
        Refusal: their sizes change during the run, or a plugin selects or weights within each.
    """
    loss, shaping = plan.spec.loss, plan.shaping
    choices = {
        "the sizes of batches change in this run": shaping and shaping.choose.owner,
        "a micro-batch's rows to train on are chosen in it": loss.rows and loss.rows.node.owner,
        "positions are weighted within a micro-batch": loss.weights and loss.weights.owner,
    }
    for what, owner in choices.items():
        if owner:
            fix = f"--plugins -{owner}, or leave out the option that changes them"
            raise Refusal(
                f"{what}, by {owner}: another division of a step is another run",
                where="minillm tune",
                fix=f"{owner}=[]" if "." in owner else fix,  # a setting, or a plugin
            )


class Tuning:
    """The candidates so far, and the fastest."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        detected: Detected,
        dtype: str,
        study: Study,
        say: Say,
        profile: Callable[[Any], Profiler],
    ) -> None:
        self.request, self.plan, self.detected = request, plan, detected
        self.memory = request.memory
        self.candidates: list[Candidate] = []
        self.timed_again = False  # whether the best one and the original settings were, in turns
        self._study, self._say, self._profile = study, say, profile
        self._dtype = dtype
        self.given = Candidate(plan, plan.estimate(self._dtype).bytes)

    @property
    def fastest(self) -> Candidate:
        """The candidate with the most tokens per second.

        Raises:
            Refusal: no candidate ran.
        """
        found = max(self.candidates, key=lambda one: one.speed)
        if not found.speeds:
            least = min(self.candidates, key=lambda one: one.predicted)
            raise Refusal(
                f"no candidate fits: {least.named}: {least.reason}",
                where=f"{sized(self.memory or 0)} of memory",
                fix="a smaller train.seq_len or model, or more memory (--memory)",
            )
        return found

    def best(self) -> Candidate:
        """Return the candidate of lowest memory among those not clearly slower than the fastest."""
        fastest = self.fastest
        near = [one for one in self.candidates if one.speeds and not one.clearly_slower(fastest)]
        return min(near, key=lambda one: one.predicted)  # the first of equal ones

    def batches(self) -> None:
        """Try splits of the step into micro-batches, the largest that fits first."""
        train = self.plan.config.train
        total = train.rows * train.accumulate
        splits = [rows for rows in range(total, 0, -1) if total % rows == 0]
        plain = [self._division(rows, total, checkpointing=False) for rows in splits]
        compiled = verdicts(self.plan, self.detected).requests[0].compiled
        ways: list[bool | str] = [*RECOMPUTED]
        if self.detected.backend != "torch" or not compiled:
            ways.remove("selective")
        if self.memory is None:
            self.memory = self._measured(plain[-1])
        tried = 2 * total
        for rows, one in zip(splits, plain, strict=True):
            if not self._fits(one):
                one.reason = f"needs about {sized(one.predicted)}"
                self.candidates.append(one)
                for place, how in enumerate(ways[1:], 1):
                    ran = {x.plan.config.train.checkpointing for x in self.candidates if x.speeds}
                    if ran & {*ways[: place + 1]}:
                        break  # recomputing as much, or more, gains nothing with fewer rows
                    again = self._division(rows, total, checkpointing=how)
                    if self._fits(again):
                        self._run(again)
            elif 2 * rows <= tried:
                tried = rows
                self._run(one)
                if one.speeds and one.clearly_slower(self.fastest):
                    break

    def plugins(self, offered: Sequence[str], planned: Callable[[Collection[str]], Plan]) -> None:
        """Try plugins of kernels, one after the other, on the fastest candidate so far.

        Those of which no kernel can serve here are left out; ``minillm kernels list`` says why.
        """
        for name in offered:
            now = self.best()
            train, added = now.plan.config.train, (*now.added, name)
            division = {"rows": train.rows, "accumulate": train.accumulate}
            try:
                plan = planned(added).with_train(**division, checkpointing=train.checkpointing)
                served = {(one.op, one.kernel) for one in verdicts(plan, self.detected).choices()}
            except MinillmError:
                continue
            ours = [c for owner, c in plan.candidates if owner == name and (c.op, c.name) in served]
            if ours and all(one.within_tolerance for one in ours):
                self._run(Candidate(plan, now.predicted, added=added))

    def kernels(self) -> None:
        """Try the other kernels of each op, one at a time, on the fastest candidate so far."""
        found = verdicts(self.best().plan, self.detected)
        chosen = {one.op: one.kernel for one in found.choices()}
        others = [
            (request.op, kernel.name)
            for request in found.requests
            for kernel in found.candidates
            if kernel.op == request.op
            and request.op not in found.policy.named
            and kernel.name != chosen[request.op]
            and kernel.within_tolerance
            and kernel.refusal(request) is None
        ]
        for op, name in others:
            now = self.best()
            policy = verdicts(now.plan, self.detected).policy.naming(op, name)
            config = now.plan.config.model_copy(update={"kernels": str(policy)})
            plan = replace(now.plan, config=config)
            self._run(Candidate(plan, now.predicted, kernel=f"{op}={name}", added=now.added))

    def confirmed(self) -> tuple[Candidate, float | None]:
        """Time the best candidate against the original settings; return the choice and its speed-up.

        Returns:
            The candidate, and its speed relative to the original settings; None: the latter do
            not fit.
        """
        best, given = self.best(), self.given
        if best.settings() == given.settings():
            return best, 1.0
        if not self._fits(given):
            return best, None
        again = replace(best, speeds=[])
        for one in (given, again, again, given):
            self._run(one, listed=False)
        if not given.speeds:
            return best, None
        self.timed_again = True
        gain = again.speed / given.speed
        return (best, gain) if given.clearly_slower(again) else (given, 1.0)

    def _division(self, rows: int, total: int, *, checkpointing: bool | str) -> Candidate:
        plan = self.plan.with_train(
            rows=rows, accumulate=total // rows, checkpointing=checkpointing
        )
        return Candidate(plan, plan.estimate(self._dtype).bytes)

    def _fits(self, one: Candidate) -> bool:
        assert self.memory is not None
        return one.predicted <= CROWDED * self.memory

    def _measured(self, smallest: Candidate) -> int:
        """Query the device's memory, through a trainer of the smallest candidate."""
        with self._study.stepper(smallest.plan) as stepper:
            found = self._profile(stepper.trainer).memory_bytes()
        gc.collect()
        return found

    def _run(self, one: Candidate, *, listed: bool = True) -> None:
        """Time a candidate alone in memory; record why it did not run to its end.

        Raises:
            MinillmError: a plugin's code raised, in a candidate without plugins or kernels of the tuning's own.
        """
        if listed:
            self.candidates.append(one)
        try:
            self._time(one)
        except OutOfMemory as error:
            one.speeds.clear()
            one.reason = f"out of memory: {error.where or error.what}"  # the framework's message
        except Refusal as refusal:  # the kernel of a plugin that has no effect without it
            one.reason = f"refused: {refusal.what}"
        except KeyboardInterrupt:
            one.speeds.clear()
            one.reason = "ended by a signal"
            raise
        except MinillmError as error:
            if not (one.added or one.kernel) or isinstance(error, Interrupted | Stopped):
                raise
            one.speeds.clear()
            one.reason = f"failed: {error.what}"
        gc.collect()  # compiled steps are in reference cycles
        speed = f"{one.speed:,.0f} tokens/s" if one.speeds else one.reason
        self._say(f"{one.named}: {speed}")

    def _time(self, one: Candidate) -> None:
        with self._study.stepper(one.plan) as stepper:
            profiler = self._profile(stepper.trainer)
            profiler.trim()
            one.first = stepper.run(1).seconds + stepper.trainer.compile_seconds
            stepper.run(WARM - 1)
            profiler.forget_peak()
            for _ in range(self.request.repeats):
                with without_gc():
                    timed = stepper.run(self.request.steps)
                one.speeds.append(timed.real / timed.seconds)
            if profiler.held_bytes() is not None:  # otherwise the peak is the whole process's
                one.peak = profiler.peak_bytes()
            peak_flops = stepper.trainer.binding.peak_flops
            flops = one.plan.estimate().flops_per_token
            one.mfu = one.speed * flops / peak_flops if peak_flops else None
