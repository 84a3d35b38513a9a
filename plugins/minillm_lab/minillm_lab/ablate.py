"""``minillm ablate``: check the request, lock the folder, train the missing runs, write the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm_core import Plan, Refusal
from minillm_core.commands import counted, few
from minillm_core.studies import (
    Binding,
    LoadedPlugin,
    Prepared,
    StopRequest,
    lock,
    refuse_unwritable,
    stop_on_signals,
)
from minillm_lab.ablation import RESULT, Ablation, Watch
from minillm_lab.cards import cards_of, write_card
from minillm_lab.members import choose_folder, facts_of, refuse_other
from minillm_lab.pool import Pool, check_devices, shared
from minillm_lab.study import Study, bind, gpu_bytes, open_corpus
from minillm_lab.variants import Design, leave_one_out, one_at_a_time

MOST_SEEDS = 64

SHOWN = 20
"""Maximum number of plugins named in the line about the baseline."""

FLAG = "--plugins"
"""Origin of plugins that neither the preset nor the file names."""

UNCOUNTED = 1.3
"""Factor on a plan's estimate of its memory: with a process's margin it exceeds the largest peak that was
measured on a GPU, 1.43 times the estimate."""


@dataclass(frozen=True)
class Request:
    """A requested ablation, and its surroundings."""

    judged: tuple[str, ...]  # plugins to measure, in the order of their runs
    prepared: Prepared  # settings and plugins of every run (the judged and their company), machine
    runs: Path  # parent of folders that are not named
    cache: Path  # the token cache
    say: Callable[[str], None]  # prints a line
    out: Path | None = (
        None  # runs and results; an interrupted ablation is resumed there. None: a new one
    )
    seeds: int = 3
    minutes: float | None = None  # of each run, instead of steps; None: those of the settings
    leave_one_out: bool = False
    equal_seconds: bool = True  # compare at equal seconds too: more runs of the baseline
    evaluations: int | None = None  # of each run; None: as many as take a quarter of its time
    devices: tuple[str, ...] = ()  # that train runs at the same time; (): the one that is prepared
    processes: int | None = None
    """Number that share each device: they compile side by side and train in turns; None: as many as fit."""
    watch: Watch = lambda current, progress: None  # called with the current run and its progress


@dataclass(frozen=True)
class Ready:
    """A checked ablation; its folder is not locked yet."""

    open: Callable[[StopRequest], Ablation]
    out: Path
    lines: tuple[str, ...]  # printed before the first run


def ablate(request: Request, *, cards: Path) -> tuple[dict[str, Any], Path]:
    """Measure the worth of each judged plugin.

    Args:
        request: plugins, settings and folders.
        cards: the folder for technique cards, written if an ablation has enough pairs.

    Returns:
        The result as in ablation.json, and the folder.

    Raises:
        Refusal: the request is invalid; no run was started.
        Stopped: a signal; finished runs are kept, and the same call resumes.
        MinillmError: any other failure, such as an exception in a plugin's code.
    """
    ready = prepare_ablation(request)
    with stop_on_signals(patient=True) as stop:
        ready.out.mkdir(parents=True, exist_ok=True)
        with lock(ready.out, request.say):
            opened = ready.open(stop)
            if opened.steps:
                opened.find()  # rejects the runs of another ablation before anything is printed
            for line in (*ready.lines, *opened.replaced()):
                request.say(line)
            result = opened.run()
            _write_cards(result, cards, request.say)
            return result, ready.out


def prepare_ablation(
    request: Request,
    *,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    at: str | None = None,
    design: Design | None = None,
) -> Ready:
    """Validate an ablation and open its corpus.

    Args:
        request: plugins, settings and folders.
        turn: as for :class:`~minillm_lab.study.Study`.
        at: the commit of minillm's repository, for an installation outside it.
        design: the plugin sets to compare; default: those of the request.

    Raises:
        Refusal: the ablation cannot be run.
    """
    loaded, plugins = request.prepared.loaded, request.prepared.plugins
    config, detected = loaded.config, request.prepared.detected
    assert detected is not None  # otherwise already refused
    if request.minutes is None and config.train.steps is None:
        request = replace(request, minutes=config.train.minutes)
    _check(request)
    check_devices(request.devices, detected)
    _refuse_watchers(plugins)
    shape = leave_one_out if request.leave_one_out else one_at_a_time
    design = design or shape(loaded, plugins, request.judged)
    # reject plugins and kernels that do not run here before reading the corpus
    binding, *_ = [bind(variant.plan, detected) for variant in design.variants]
    notes: list[str] = list(loaded.notes)
    plans = [variant.plan for variant in design.variants]
    reports = {"say": request.say, "note": notes.append}
    corpus = open_corpus(config, cache=request.cache, plans=plans, **reports)
    out = request.out or choose_folder(request.runs, "ablation")
    refuse_other(out, RESULT)
    refuse_unwritable(out)
    about = {
        **facts_of(loaded, corpus, binding, plugins),
        "train": config.train.model_dump(mode="json"),
        "eval_tokens": config.eval.tokens,
        **({"commit": at} if at else {}),
    }

    def opened(stop: StopRequest) -> Ablation:
        pool = None
        if found := _shared(request, binding, plans):
            given = {"backend": detected.backend, "cache": request.cache, "stop": stop}
            pool = Pool(found[0], plans, each=found[1], **given)
        return Ablation(
            out,
            design,
            [config.seed + index for index in range(request.seeds)],
            Study(corpus, detected, stop=stop, say=request.say, turn=turn),
            steps=None if request.minutes else config.train.steps,
            minutes=request.minutes,
            about=about,
            say=request.say,
            watch=request.watch,
            evaluations=request.evaluations,
            turns=not binding.compile,
            pool=pool,
            equal_seconds=request.equal_seconds,
        )

    return Ready(opened, out, (*notes, *_opening(design, request, out, corpus.description)))


def _shared(
    request: Request, binding: Binding, plans: Sequence[Plan]
) -> tuple[tuple[str, ...], int] | None:
    """Return the devices and the processes for each that train the runs; None: they are trained here."""
    peak = memory = None
    if request.processes is None and binding.device.startswith("cuda"):
        peak = int(UNCOUNTED * max(plan.estimate(binding.dtype).bytes for plan in plans))
        memory = gpu_bytes(binding.device)
    about = {"device": binding.device, "compiled": binding.compile, "peak": peak, "memory": memory}
    if (found := shared(request.devices, request.processes, **about)) is None:
        return None
    devices, each = found
    return devices, min(each, len(plans))


def _write_cards(result: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Write the cards shown by ``minillm plugins info``, replacing older ones."""
    cards, why = cards_of(result)
    if why:
        say(why)
    for card in cards:
        try:
            say(f"technique card: {write_card(folder, card)}")
        except OSError as error:  # the result is written; the same command retries this
            say(f"warning: no card of '{card.plugin}' could be written: {error}")


def _check(request: Request) -> None:
    if not request.judged:
        raise Refusal(
            "no plugin is to be judged",
            where="--plugins",
            fix="--plugins muon,paired_heads, or a preset that names plugins",
        )
    if not 1 <= request.seeds <= MOST_SEEDS:
        raise Refusal(
            f"an ablation has 1 to {MOST_SEEDS} seeds",
            where=f"--seeds {request.seeds}",
            fix="--seeds 3; 5 make a technique card",
        )
    loaded = request.prepared.loaded
    steps = loaded.config.train.steps
    if request.minutes is None:
        if steps is None:
            raise Refusal(
                "nothing says how long each run is",
                where="train.steps",
                fix="--steps, or --minutes",
            )
        return
    if not 0 < request.minutes < math.inf:
        raise Refusal(
            f"no run can take {request.minutes:g} minutes",
            where=f"--minutes {request.minutes:g}",
            fix="--minutes 0.5",
        )
    origin = loaded.origins["train.steps"]
    if steps is not None and not origin.startswith("preset "):  # a preset's is overridden
        raise Refusal(
            f"{steps:,} steps and {request.minutes:g} minutes are both given",
            where=f"--minutes {request.minutes:g}; train.steps from {origin}",
            fix="leave one of them out",
        )


def _refuse_watchers(plugins: Sequence[LoadedPlugin]) -> None:
    """Reject experiment trackers and similar plugins, which cannot distinguish the runs of an ablation."""
    for one in plugins:
        if one.plugin.hooks == ("on_event",):
            raise Refusal(
                f"plugin '{one.name}' watches runs and changes none: there is nothing to judge, and "
                "the runs of an ablation have no folder for it",
                where=f"plugin '{one.name}'",
                fix=f"leave it out; --plugins -{one.name} removes what a preset or a file names",
            )


def _opening(design: Design, request: Request, out: Path, data: str) -> list[str]:
    count = len(design.variants) * request.seeds
    more = (
        ", then the baseline's at equal seconds (--no-equal-seconds leaves these out)"
        if request.equal_seconds
        else ""
    )
    lines = [
        f"{design.kind}: {len(design.variants)} sets of plugins x {counted(request.seeds, 'seed')}, "
        f"{count} runs{more}, into {out}",
        f"data    {data}",
        *_taken_out(design, request),
    ]
    lines += [f"'{name}' is not judged: {why}" for name, why in design.unplanned.items()]
    lines += [
        f"'{one.plugin}' is left out together with what builds on it: {few(one.together)}"
        for one in design.comparisons
        if one.together
    ]
    return lines


def _taken_out(design: Design, request: Request) -> list[str]:
    """Describe a baseline that is without measured plugins of the preset or the file; else return nothing."""
    first, origins = design.variants[0], request.prepared.loaded.origins
    active = [one.name for one in first.plan.active]
    missing: dict[str, list[str]] = {}
    for one in design.comparisons:
        origin = origins.get(f"plugins.{one.plugin}", FLAG)
        if one.without == first.name and one.plugin not in active and origin != FLAG:
            missing.setdefault(origin, []).append(one.plugin)
    if not missing:
        return []
    without = ", and ".join(
        f"{few(names, SHOWN)}, which {origin} names" for origin, names in missing.items()
    )
    return [f"{first.name}: {few(active, SHOWN) or 'no plugins'} (without {without})"]
