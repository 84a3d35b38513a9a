"""The whole job of ``minillm ablate``, in order: check, lock, run what is missing, record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minillm_core import backends
from minillm_core.backends.base import Backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint import lock
from minillm_core.config.load import Loaded
from minillm_core.data import open_corpus
from minillm_core.errors import Refusal
from minillm_core.measure.ablation import RESULT, Ablation, Watch
from minillm_core.measure.card import write_card
from minillm_core.measure.carding import cards_of, commit
from minillm_core.measure.rig import Rig
from minillm_core.measure.variants import Design, leave_one_out, one_at_a_time
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.text import counted
from minillm_core.train.record import RUN, hardware, refuse_unwritable, versions
from minillm_core.train.signals import StopRequest, stop_on_signals

__all__ = ["Ready", "Request", "Study", "ablate", "choose_folder", "readied"]

MOST_SEEDS = 64


@dataclass(frozen=True)
class Request:
    """What an ablation is to find out, beside the settings of its runs."""

    judged: tuple[str, ...]  # plugins, in the order of their runs
    seeds: int = 3
    minutes: float | None = None  # of each run, instead of steps
    leave_one_out: bool = False
    validations: int | None = None  # of each run; None: as many as cost a quarter of its time


@dataclass(frozen=True)
class Study:
    """An ablation study that is asked for, and what it needs of its surroundings."""

    request: Request
    loaded: Loaded  # settings of every run; they name the judged plugins and their company
    plugins: Sequence[LoadedPlugin]  # all of those, loaded
    detected: Detected  # backend and device
    out: Path | None  # runs and results; some of this one's are gone on with. None: runs/ablation-N
    runs: Path  # where folders without a name are made
    cache: Path  # where tokens are kept
    say: Callable[[str], None]  # prints a line
    watch: Watch = lambda going, progress: None  # which run goes on, what is ahead, how far it is
    create: Callable[[Detected, Plan], Backend] | None = None  # None: backends.create


@dataclass(frozen=True)
class Ready:
    """An ablation that can be run, in OUT, which is not locked yet."""

    open: Callable[[StopRequest], Ablation]
    out: Path
    lines: tuple[str, ...]  # what is to be said before


def ablate(study: Study, *, cards: Path) -> tuple[dict[str, Any], Path]:
    """Measure what each judged plugin is worth.

    Args:
        study: which plugins, how, and where.
        cards: where the technique cards of an ablation with enough pairs are written.

    Returns:
        The result as in ablation.json, and the folder.

    Raises:
        Refusal: nothing was started.
        Stopped: a signal; finished runs are kept, and the same call goes on.
        MinillmError: a plugin's own code raised, say.
    """
    ready = readied(study)
    with stop_on_signals(patient=True) as stop:
        ready.out.mkdir(parents=True, exist_ok=True)
        with lock(ready.out, study.say):
            opened = ready.open(stop)
            if opened.steps:
                opened.find()  # runs of another ablation are refused before anything is said
            for line in ready.lines:
                study.say(line)
            result = opened.run()
            _write_cards(result, cards, study.say)
            return result, ready.out


def readied(
    study: Study,
    *,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    at: str | None = None,
    design: Design | None = None,
) -> Ready:
    """Check an ablation and open its text.

    Args:
        study: which plugins, how, and where.
        turn: as for :class:`~minillm_core.measure.rig.Rig`.
        at: the commit of minillm's repository, where it does not run from one.
        design: what is compared, where the request does not say it.

    Raises:
        Refusal: it cannot be made.
    """
    request, loaded, plugins, detected = study.request, study.loaded, study.plugins, study.detected
    config = loaded.config
    _check(request, loaded)
    check_support(plugins, detected.backend, detected.device)
    _refuse_watchers(plugins)
    shape = leave_one_out if request.leave_one_out else one_at_a_time
    design = design or shape(loaded, plugins, request.judged)
    first = design.variants[0].plan
    binding = (study.create or backends.create)(detected, first).binding
    for variant in design.variants[1:]:  # a kernel that cannot serve is to be told now
        backends.bind(detected, variant.plan)
    notes: list[str] = list(loaded.notes)
    corpus = open_corpus(
        config.data, config.model.vocab, config.train.seq_len, cache=study.cache, say=notes.append
    )
    out = study.out or choose_folder(study.runs)
    if (out / RUN).exists():
        raise Refusal(
            f"{out} holds a run of minillm train",
            where=str(out / RUN),
            fix="--out with another folder",
        )
    refuse_unwritable(out)
    distributions = [one.distribution for one in plugins if one.distribution]
    about = {
        "data": {"fingerprint": corpus.fingerprint, "description": corpus.description},
        "model": config.model.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "eval_tokens": config.eval.tokens,
        "preset": config.preset,
        "backend": binding.backend,
        "device": binding.device_name,
        "dtype": binding.dtype,
        "hardware": hardware(binding.device_name),
        "versions": versions(binding.backend, distributions),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": at or commit(),
    }

    def opened(stop: StopRequest) -> Ablation:
        return Ablation(
            out,
            design,
            [config.seed + index for index in range(request.seeds)],
            Rig(corpus, detected, stop=stop, say=study.say, create=study.create, turn=turn),
            steps=None if request.minutes else config.train.steps,
            minutes=request.minutes,
            about=about,
            say=study.say,
            watch=study.watch,
            validations=request.validations,
        )

    return Ready(opened, out, (*notes, *_told(design, request, out, corpus.description)))


def _write_cards(result: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Write what ``minillm plugins info`` shows, in the place of what was measured before."""
    cards, why = cards_of(result)
    if why:
        say(why)
    for card in cards:
        try:
            say(f"technique card: {write_card(folder, card)}")
        except OSError as error:  # the result is there, and the same command tries this again
            say(f"warning: no card of '{card.plugin}' could be written: {error}")


def choose_folder(runs: Path) -> Path:
    """runs/ablation-<first n that no finished ablation has>."""
    n = 1
    while (runs / f"ablation-{n}").exists():
        n += 1
    return runs / f"ablation-{n}"


def _check(request: Request, loaded: Loaded) -> None:
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
    if steps is not None and not origin.startswith("preset "):  # a preset's give way
        raise Refusal(
            f"{steps:,} steps and {request.minutes:g} minutes are both given",
            where=f"--minutes {request.minutes:g}; train.steps from {origin}",
            fix="leave one of them out",
        )


def _refuse_watchers(plugins: Sequence[LoadedPlugin]) -> None:
    """Refuse trackers and their like: an ablation's runs would not be told apart by them, nor kept."""
    for one in plugins:
        if one.plugin.hooks == ("on_event",):
            raise Refusal(
                f"plugin '{one.name}' watches runs and changes none: there is nothing to judge, and "
                "the runs of an ablation have no folder for it",
                where=f"plugin '{one.name}'",
                fix=f"leave it out; --plugins -{one.name} takes away what a preset or a file names",
            )


def _told(design: Design, request: Request, out: Path, data: str) -> list[str]:
    count = len(design.variants) * request.seeds
    lines = [
        f"{design.kind}: {len(design.variants)} sets of plugins x {counted(request.seeds, 'seed')}, "
        f"{count} runs and those at equal seconds, into {out}",
        f"data    {data}",
    ]
    lines += [f"'{name}' is not judged: {why}" for name, why in design.unplanned.items()]
    if (out / RESULT).exists():
        lines.append("finished runs that are there already are not made again")
    return lines
