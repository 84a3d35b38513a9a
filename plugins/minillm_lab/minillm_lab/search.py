"""``minillm search``: check the request, lock the folder, measure speed, search, write the recipe."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm_core import (
    Interrupted,
    MinillmError,
    Plan,
    PlanError,
    Refusal,
    build_plan,
)
from minillm_core.commands import counted, duration, few, listed
from minillm_core.inspection import find_plugin, installed_plugins
from minillm_core.studies import (
    Binding,
    Prepared,
    RunRequest,
    StopRequest,
    added,
    lock,
    prepare,
    read_json,
    refuse_unwritable,
    settings_file,
    stop_on_signals,
    taken_away,
)
from minillm_lab.members import (
    ANEW,
    RUNS,
    Members,
    choose_folder,
    continuing,
    facts_of,
    read,
    stopped,
    understood,
)
from minillm_lab.paired_runs import Length, PairedRuns, Watch, in_words, with_evaluation
from minillm_lab.pool import Pool, check_devices, shared
from minillm_lab.resumed import begun_with, refuse_changed, refuse_folder
from minillm_lab.search_page import (
    PAGE,
    RESTORED,
    RESULT,
    failed_words,
    markdown,
    reached_words,
    search_page,
)
from minillm_lab.space import (
    Recipe,
    Space,
    installed,
    parts_of,
    prospects,
    read_space,
    usual_space,
)
from minillm_lab.study import Study, bind, open_corpus
from minillm_lab.successive_halving import LEAST, SuccessiveHalving

BEST, TEXT = "best.toml", "search.md"

UNFINISHED = "the search is not finished: this is its recipe so far"
"""A remark in ``best.toml``, which is written after each stage, since a search may be cut off."""

FIRST = 20
"""Steps of the first run towards a target loss; each further run is longer by the factor ``LONGER``."""

LONGER = 1.5

REACH = 0.4
"""Maximum fraction of the budget for reaching the target with the baseline settings."""

SHORTER = 0.8
"""Factor by which a recipe's run is shortened repeatedly until it misses the target."""


@dataclass(frozen=True)
class Request:
    """A requested search, and its surroundings."""

    asked: RunRequest  # the settings to begin with, without the plugins to try
    runs: Path  # parent of folders that are not named
    cache: Path  # the token cache
    say: Callable[[str], None]  # prints a line
    budget: float  # seconds
    minutes: float | None = None  # of training, of the run for which the recipe is optimised
    tokens: float | None = None  # or its tokens
    target: float | None = None  # or the held-out loss to reach in the shortest time
    plugins: str | None = None  # that may be added, and -NAME; None: all installed ones
    space: Path | None = None
    out: Path | None = None
    resume: bool = False
    devices: tuple[str, ...] = ()  # that train runs at the same time; (): the one of ``asked``
    processes: int | None = None  # that share each device; None: as many as fit
    watch: Watch = field(default=lambda current, progress: None)


def seconds_of(text: str) -> float:
    """Parse a duration into seconds: ``0.5`` hours, ``20m``, ``1h30m``, ``90s``.

    Raises:
        Refusal: not a duration, or not above 0.
    """
    found = re.fullmatch(r"(?:(?P<h>[\d.]+)h)?(?:(?P<m>[\d.]+)m)?(?:(?P<s>[\d.]+)s)?", text)
    try:
        if found and any(found.groups()):
            parts = found.groupdict(default="0")
            seconds = 3600 * float(parts["h"]) + 60 * float(parts["m"]) + float(parts["s"])
        else:
            seconds = 3600 * float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise Refusal(
            f"'{text}' is not a time",
            where=f"--budget {text}",
            fix="--budget 20m, 1h30m, or 1.5 hours",
        )
    return seconds


class Plans:
    """A map from recipes to plans, resolved as by ``minillm train``.

    Args:
        asked: the baseline settings.
        prepared: the same, resolved.
        specs: plugin that may be added -> the file to load it from, if it is not installed.
        removed: plugins that the preset names and the search begins without.
    """

    def __init__(
        self,
        asked: RunRequest,
        prepared: Prepared,
        specs: Mapping[str, Any],
        removed: Collection[str] = (),
    ) -> None:
        assert prepared.detected is not None
        self._asked, self._detected = asked, prepared.detected
        origins = prepared.loaded.origins
        self._named = {  # by the preset or the file, so that -NAME takes them away
            one for one in prepared.loaded.specs if origins[f"plugins.{one}"] != "--plugins"
        }
        self._specs = {**prepared.loaded.specs, **specs}
        self.base = Recipe(frozenset(prepared.loaded.specs) - {*removed})
        self._made: dict[str, Plan | MinillmError] = {}
        self._sourcing = self(self.base).sourcing

    def __call__(self, recipe: Recipe) -> Plan:
        """Plan a recipe, bound to this machine.

        Raises:
            MinillmError: it cannot be planned, does not run here, or reads other documents.
        """
        if recipe.key not in self._made:
            try:
                self._made[recipe.key] = self._plan(recipe)
            except MinillmError as error:
                self._made[recipe.key] = error
        found = self._made[recipe.key]
        if isinstance(found, MinillmError):
            raise found
        return found

    def _plan(self, recipe: Recipe) -> Plan:
        names = [str(self._specs.get(one, one)) for one in sorted(recipe.plugins)]
        names += [f"-{one}" for one in sorted(self._named - recipe.plugins)]
        request = replace(
            self._asked,
            plugins=",".join(names) or None,
            settings={**(self._asked.settings or {}), **recipe.settings},
        )
        prepared = prepare(request, to_run=True)
        for one in prepared.plugins:
            if one.plugin.manifest.task:
                raise PlanError("it says what is trained on, and so what the loss is of")
            if one.name not in self.base.plugins and {*one.plugin.hooks} <= {
                "on_event",
                "on_evaluated",
            }:
                raise PlanError("it watches runs and changes none")
        plan = build_plan(prepared.loaded, prepared.plugins)
        if recipe is not self.base and plan.sourcing != self._sourcing:
            raise PlanError("it reads other documents, or other special tokens")
        bind(plan, self._detected)
        return plan


def search(request: Request) -> tuple[dict[str, Any], Path]:
    """Find a recipe for a corpus, a machine and a training length.

    Args:
        request: settings, length, budget and folders.

    Returns:
        The result as in search.json, and the folder, which contains ``best.toml``.

    Raises:
        Refusal: the request is invalid; no run was started.
        Stopped: a signal; finished runs are kept, and the same command with --resume continues.
        MinillmError: the baseline settings cannot be trained, or miss the target.
    """
    _check(request)
    prepared = prepare(request.asked, to_run=True)
    _refuse_length(request, prepared)
    assert prepared.detected is not None  # otherwise already refused
    removed = taken_away(request.plugins)
    named = dict(added(request.plugins))
    for spec in named.values():
        find_plugin(str(spec), where=f"--plugins {request.plugins}")
    config, detected = prepared.loaded.config, prepared.detected
    check_devices(request.devices, detected)
    plans = Plans(request.asked, prepared, named, removed)
    base = plans(plans.base)
    usual = usual_space(
        base,
        list(named) or installed(removed, config.seed),
        base.num_parameters,
    )
    space = usual
    if request.space is not None:
        names = [one.name for one in installed_plugins()]
        space = read_space(request.space, usual, [*names, *named])
        if named:
            space = replace(space, plugins=tuple(named))
    all_installed = not named and space.plugins == usual.plugins
    known = prospects(
        {name: named.get(name, name) for name in space.plugins},
        equal_seconds=request.tokens is None,
        leave_out=request.say if all_installed else None,
    )
    order = known if request.space is None and not named else space.plugins
    space = replace(space, prospects=known, plugins=tuple(one for one in order if one in known))
    out = request.out or choose_folder(request.runs, "search")
    refuse_folder(out, resume=request.resume)
    if request.resume:
        earlier = read_json(out / RESULT)
        with understood(out / RESULT, RESTORED):
            space = begun_with(
                space,
                earlier,
                plugins=not all_installed,
                values=request.space is not None,
                removed=removed,
            )
        for one in space.plugins:  # as with the command that began it
            find_plugin(str(named.get(one, one)), where=str(out / RESULT))
    notes = list[str](prepared.loaded.notes)
    corpus = open_corpus(
        config, cache=request.cache, say=request.say, note=notes.append, plans=[base]
    )
    refuse_unwritable(out)
    binding = bind(base, detected)
    about = {
        **facts_of(prepared.loaded, corpus, binding, base.active),
        "plugins": sorted(plans.base.plugins),
        "asked": {
            "plan_hash": base.hash,
            "rows": [config.train.rows, config.train.accumulate],
            "seed": config.seed,
            "minutes": request.minutes,
            "tokens": request.tokens,
            "target": request.target,
            "space": space.data(),
        },
        "prospects": [[name, one.gain, list(one.company)] for name, one in space.prospects.items()],
    }
    with stop_on_signals(patient=True) as stop:
        out.mkdir(parents=True, exist_ok=True)
        with lock(out, request.say):
            study = Study(corpus, detected, stop=stop, say=request.say)
            job = Job(request, out, study, plans, space, about, binding=binding, stop=stop)
            try:
                for line in notes:
                    request.say(line)
                return job.run(), out
            except (Interrupted, KeyboardInterrupt):
                kept = len([*(out / RUNS).glob("*.json")])
                way_on = continuing(out, "--resume")
                begun = (out / RESULT).exists()  # then the folder is refused without --resume
                raise stopped(out, kept, way_on, anew=way_on if begun else ANEW) from None


class Job:
    """A search whose folder is locked and whose corpus is open."""

    def __init__(
        self,
        request: Request,
        out: Path,
        study: Study,
        plans: Plans,
        space: Space,
        about: Mapping[str, Any],
        *,
        binding: Binding,
        stop: StopRequest,
    ) -> None:
        self.pool: Pool | None = None
        self.request, self.out, self.study, self.plans = request, out, study, plans
        self.space, self.about, self.say = space, dict(about), request.say
        self._binding, self._stop = binding, stop
        self.members = Members(
            out,
            study,
            "search",
            self.say,
            findings=(MinillmError,),
            way_on=continuing(out, "--resume"),
        )
        self.earlier = read(out / RESULT) or {}
        self.before = 0.0  # seconds that the earlier start spent
        self.halving: SuccessiveHalving | None = None
        self.reached: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Measure the speed, run the rounds and write the result; raises as :func:`search`."""
        with understood(self.out / RESULT, RESTORED):
            refuse_changed(self.out, self.earlier, self.about["asked"])
            self.before = float(self.earlier.get("spent_seconds", 0.0))
            if measured := self.earlier.get("measured"):
                float(measured["tokens_per_second"])
        base = self.plans(self.plans.base)
        self.measured = measured or self._measure(base)
        speed = float(self.measured["tokens_per_second"])
        self.pool = self._pool(base)
        self.study.release()  # the first run is to compile, as it is counted
        if self.pool is None:
            return self._run(base, speed)
        self.say(self.pool.opening)
        with self.pool:
            return self._run(base, speed)

    def _pool(self, base: Plan) -> Pool | None:
        """Choose the processes that train runs; None: runs are trained one after the other, here."""
        request, bound = self.request, self._binding
        peak, memory = (self.measured.get(key) for key in ("peak_bytes", "device_bytes"))
        about = {"device": bound.device, "compiled": bound.compile, "peak": peak, "memory": memory}
        if (found := shared(request.devices, request.processes, **about)) is None:
            return None
        devices, each = found
        return Pool(
            devices,
            [base],
            backend=bound.backend,
            cache=request.cache,
            stop=self._stop,
            each=each,
        )

    def _run(self, base: Plan, speed: float) -> dict[str, Any]:
        request = self.request
        paired_runs = self._paired_runs(Length(request.minutes, request.tokens), speed)
        if request.target is not None:
            if not self.earlier:  # written before the first run: its length depends on the speed
                start = {"measured": self.measured, "finished": False, **self.about}
                self.members.write(RESULT, start)
            self._reach(paired_runs, base, request.target)
        length = paired_runs.length
        self._refuse_no_step(length, base, speed)
        self.halving = SuccessiveHalving(
            *(paired_runs, self.plans, self.space, self.plans.base),
            budget=request.budget,
            note=self._note,
        )
        if (least := self.halving.least_cost()) > request.budget:
            raise Refusal(
                f"the budget of {duration(request.budget)} is too small: a search of runs of "
                f"{length.words} takes {duration(least)} at least, for one change and the last "
                "comparison",
                where=f"--budget, {speed:,.0f} tokens/s",
                fix=f"--budget {math.ceil(4 * least / 60)}m{self._kept} tries several changes, "
                f"{math.ceil(1.1 * least / 60)}m is the least; or shorter runs",
            )
        if not self.halving.candidates():
            raise self._nothing_to_try(self.halving.refused, base)
        self._announce(length)
        self._write(finished=False)
        self.halving.run()
        if request.target is not None:
            self._shorten(request.target)
        return self._write(finished=True)

    def _refuse_no_step(self, length: Length, base: Plan, speed: float) -> None:
        """Refuse a length that is over before the first step."""
        seconds = base.tokens_per_step / speed
        if (length.tokens or length.seconds(speed) * speed) >= base.tokens_per_step:
            return
        flag, given, enough = (
            ("--minutes", length.minutes, f"{FIRST * seconds / 60:.2g}")
            if length.minutes
            else ("--tokens", length.tokens, str(FIRST * base.tokens_per_step))
        )
        raise Refusal(
            f"a run of {length.words} is shorter than a step, which has {base.tokens_per_step:,} tokens "
            f"and takes about {seconds:.2g} s",
            where=f"{flag} {given:g}",
            fix=f"{flag} {enough}",
        )

    def _nothing_to_try(self, refused: Mapping[str, str], base: Plan) -> Refusal:
        place = f"--space {self.request.space}" if self.request.space else "the search space"
        if not refused and (idle := self.space.inactive(base)):
            more = ", ".join(f'"{name}"' for name in (*self.space.plugins, *idle))
            return Refusal(
                f"there is nothing to try: the space has options of {listed(idle)}, which "
                f"{'is' if len(idle) == 1 else 'are'} not active",
                where=f"{place}, {', '.join(f'[{name}]' for name in idle)}",
                fix=f"plugins = [{more}] in the file: a plugin is tried, then its options",
            )
        why = (
            "planning refuses every change"
            if refused
            else "the space has no other value than those that are set"
        )
        return Refusal(
            f"there is nothing to try: {why}",
            where=few([f"{name}: {words}" for name, words in refused.items()]) or place,
            fix="other --plugins, or another --space",
        )

    @property
    def _kept(self) -> str:
        """The option that resumes the search whose search.json is in the folder; empty without one."""
        return " --resume" if (self.out / RESULT).exists() else ""

    def _measure(self, base: Plan) -> dict[str, Any]:
        """Measure the baseline's tokens per second and peak memory, in a run of twelve steps."""
        self.say("measuring how long a step takes")
        short = with_evaluation(base, base.config.train.seq_len)
        return self.study.measure(short, base.config.seed)

    def _paired_runs(self, length: Length, speed: float) -> PairedRuns:
        base = self.plans(self.plans.base)
        return PairedRuns(
            *(self.members, base, length),
            seed=base.config.seed,
            speed=speed,
            about=self.about,
            say=self.say,
            watch=self.request.watch,
            turns=not self._binding.compile,
            pool=self.pool,
        )

    def _reach(self, paired_runs: PairedRuns, base: Plan, target: float) -> None:
        """Set the length of the runs to one at which the baseline settings reach the target.

        Raises:
            MinillmError: they miss it within their share of the budget.
        """
        speed = paired_runs.speed
        length = first = Length(minutes=FIRST * base.tokens_per_step / speed / 60)
        while True:
            paired_runs.length = length
            run = paired_runs.alone(
                f"looking for a loss of {target:g}",
                *(base, length, base.config.seed, f"as it is, {length.words}"),
            )
            if isinstance(run, str):
                raise MinillmError(
                    f"the settings that the search begins with cannot be trained: {run}"
                )
            self.say(f"{length.words}: loss {run.val_loss:.4f}")
            if run.val_loss <= target:
                if length == first:
                    raise Refusal(
                        f"a loss of {target:g} is reached by the settings as they are within "
                        f"{counted(run.steps, 'step')}, the shortest run that is tried",
                        where=f"--target {target:g}; the loss is {run.val_loss:.4f} then",
                        fix="a lower --target, or --minutes or --tokens in its place"
                        + ", with another --out" * (self.request.out is not None),
                    )
                return
            length = length.shorter(1 / LONGER)
            if self.members.spent + length.seconds(speed) > REACH * self.request.budget:
                raise MinillmError(
                    f"the settings that the search begins with do not reach a loss of {target:g} within "
                    f"{REACH:.0%} of the budget: {run.val_loss:.4f} after {run.seconds:,.0f} s",
                    where=f"--target {target:g}",
                    fix="a larger --budget, or a target that they do reach",
                )

    def _shorten(self, target: float) -> None:
        """Find the shortest length at which the recipe still reaches the target."""
        halving = self.halving
        assert halving is not None
        length, speed, self.reached = halving.length, halving.paired_runs.speed, {}
        while True:
            run = halving.paired_runs.alone(
                f"the shortest run to a loss of {target:g}",
                *(halving.plan, length, halving.seed, f"the recipe, {length.words}"),
            )
            if isinstance(run, str) or run.val_loss > target:
                break
            self.reached = {"minutes": length.minutes, "seconds": run.seconds, "loss": run.val_loss}
            length = length.shorter(1 / SHORTER)
            if length.seconds(speed) * speed < LEAST * halving.plan.tokens_per_step:
                break
            if self.members.spent + length.seconds(speed) > 1.1 * self.request.budget:
                break

    def _announce(self, length: Length) -> None:
        halving = self.halving
        assert halving is not None
        moves = self.space.moves(halving.base, halving.base_plan, halving.base)
        self.say(
            f"{counted(len(moves), 'change')} to try on preset {self.about['preset']}, in runs of "
            f"{', '.join(one.words for one in halving.lengths)}; {duration(self.request.budget)} in all, "
            f"into {self.out}"
        )
        self.say(f"data    {self.about['data']['description']}")
        if idle := self.space.inactive(halving.base_plan):
            which = f"{idle[0]} is" if len(idle) == 1 else "they are"
            self.say(
                f"options of {listed(idle)} are not tried: {which} not enabled, and not in the space's list "
                "of plugins"
            )

    def result(self, *, finished: bool) -> dict[str, Any]:
        """Return the results so far as JSON."""
        halving = self.halving
        assert halving is not None
        return {
            "length": {
                "minutes": halving.length.minutes,
                "tokens": halving.length.tokens,
                "words": halving.length.words,
            },
            "rungs": [one.words for one in halving.lengths],
            "by_pace": halving.paired_runs.by_pace,
            "budget_seconds": self.request.budget,
            "spent_seconds": self.members.spent,
            "measured": self.measured,
            "devices": list(self.request.devices),
            "steps": halving.steps,
            "recipe": [one.name for one in parts_of(halving.incumbent, halving.base)],
            "last": halving.last,
            "target": self.reached,
            "rounds": halving.rounds,
            "refused": halving.refused,
            "untried": halving.untried,
            "finished": finished,
            "command": self._command(halving.plan),
            **self.about,
        }

    def _note(self) -> None:
        """Write the results so far."""
        self._write(finished=False)

    def _write(self, *, finished: bool) -> dict[str, Any]:
        """Write the results, unless those of the earlier start reach further than this one has so far."""
        result = self.result(finished=finished)
        if not finished and self.members.spent < self.before:
            return result
        self.members.write(RESULT, result)
        self.members.write_page(PAGE, search_page(result))
        self.members.write_page(TEXT, markdown(result))
        self.members.write_text(BEST, self._best(result))
        return result

    def _command(self, plan: Plan) -> str:
        """Return the command that trains the recipe, with its single-file plugins and a run's weights."""
        command = f"minillm train --preset {shlex.quote(str(self.out / BEST))}"
        if plan.config.init is None and (run := self.about.get("begins_with")):
            command += f" --init {shlex.quote(run)}"
        if files := [one.origin.source for one in plan.active if one.distribution is None]:
            command += f" --plugins {shlex.quote(','.join(files))}"
        return command

    def _best(self, result: Mapping[str, Any]) -> str:
        """Render the recipe with its length as the text of a settings file."""
        halving = self.halving
        assert halving is not None
        minutes = self.reached.get("minutes")
        length = Length(minutes=minutes) if minutes else halving.length
        plan = length.of(halving.plan)
        parts = " ".join(result["recipe"]) or "nothing that is distinguishable"
        reached = reached_words(result)
        gain = result["last"].get("gain") or {}
        measured = result["recipe"] and gain.get("effect") is not None
        found = f"{in_words(gain)} nats" if measured else ""
        return settings_file(
            plan.config,
            (
                result["command"],
                f"minillm search, preset {result['preset']}, runs of {halving.length.words}: {parts}",
                *([f"held-out loss against the settings as they were: {found}"] if found else []),
                *([failed] if (failed := failed_words(result)) else []),
                *([reached] if reached else []),
                *([] if result["finished"] else [UNFINISHED]),
            ),
        )


def _check(request: Request) -> None:
    lengths = {
        "--minutes": request.minutes,
        "--tokens": request.tokens,
        "--target": request.target,
    }
    given = {flag: value for flag, value in lengths.items() if value is not None}
    if len(given) != 1:
        what = (
            f"{listed([*given])} are given, and a search has one of them"
            if given
            else "a search needs --minutes, --tokens or --target"
        )
        raise Refusal(
            what,
            where=" ".join(f"{flag} {value:g}" for flag, value in given.items())
            or "the length of a run",
            fix=f"leave all but one of {listed([*given])} out"
            if given
            else "--minutes 0.5, --tokens 1000000, or --target 3.5",
        )
    ((flag, value),) = given.items()
    if not 0 < value < math.inf:
        raise Refusal(
            f"{flag} must be finite and above 0", where=f"{flag} {value:g}", fix=f"{flag} 1"
        )
    if request.resume and request.out is None:
        raise Refusal(
            "--resume does not say which search",
            where="--resume",
            fix="--resume --out with its folder, such as runs/search-1",
        )


def _refuse_length(request: Request, prepared: Prepared) -> None:
    """Check that the command line sets no run length besides that of the search."""
    origins = prepared.loaded.origins
    for key in ("train.steps", "train.minutes"):
        if origins[key] in ("command line", "--steps"):
            raise Refusal(
                f"{key} is given, and the length of the search's runs too",
                where=f"{key} from {origins[key]}",
                fix=f"leave {key} out: --minutes, --tokens or --target is the length",
            )
