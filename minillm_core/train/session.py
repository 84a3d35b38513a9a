"""One process's part of a run: check, train, evaluate, record; in a locked folder, or in memory alone.

Resuming a stopped run takes a new session.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minillm_core import disk
from minillm_core.backends.base import Backend
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.backends.ranks import ALONE, Ranks, divides
from minillm_core.checkpoint import commit, layout
from minillm_core.checkpoint.directories import export_checked
from minillm_core.checkpoint.lock import RunLock, lock
from minillm_core.checkpoint.read import Checkpoint
from minillm_core.config.origins import TOML
from minillm_core.config.schema import Config
from minillm_core.data import Corpus
from minillm_core.data.documents import fingerprint
from minillm_core.errors import Interrupted, MinillmError, NonFinite, OutOfMemory, Refusal, Stopped
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.estimate import vocabulary_note
from minillm_core.plugins.attribution import at_work, attribute_errors
from minillm_core.plugins.first_party import installing
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.plugins.provided import MEASURED, provided, required
from minillm_core.plugins.watch import running, watching
from minillm_core.text import plain
from minillm_core.train import describe, document, errors, events, record, resume
from minillm_core.train.budget import EVALUATIONS, Budget, Cadence, Position
from minillm_core.train.checkpoints import CheckpointManager
from minillm_core.train.evidence import Evidence
from minillm_core.train.feed import Feed
from minillm_core.train.generate import TextGenerator, prompts, sample
from minillm_core.train.hooks import Observers, observers, with_verdicts
from minillm_core.train.initial import Initial
from minillm_core.train.job import Job, read_corpus
from minillm_core.train.loop import Loop, Meter
from minillm_core.train.metrics import METRICS, Metrics, truncate
from minillm_core.train.predict import Predictor
from minillm_core.train.progress import Course, Display
from minillm_core.train.request import Prepared
from minillm_core.train.restore import check_references
from minillm_core.train.run_folder import RunFolder, keep_tokenizer
from minillm_core.train.signals import StopRequest
from minillm_core.train.validation import Trend, bytes_of_a_token, validation


@dataclass(frozen=True)
class Shared:
    """The state shared by the runs of a study.

    Each is one run of many: it prints only warnings about plugins, and does not evaluate the untrained
    model.
    """

    corpus: Corpus  # the text, already tokenised
    detected: Detected  # the device of all of them
    stop: StopRequest = field(default_factory=StopRequest)  # ends the current run
    warn: Callable[[str], None] = lambda line: None  # prints a warning about a plugin


@dataclass(eq=False)
class Session:
    """One process's part of a run."""

    out: Path | None  # the run's folder; None: nothing is written, or ``runs`` gets a new folder
    _: KW_ONLY
    cache: Path  # folder of tokens
    shown: Display
    stop: StopRequest
    # default: :func:`minillm_core.backends.bind.create_backend`
    create: Callable[[Detected, Plan], Backend] | None = None
    resume: bool = False  # ``out`` may hold a run, to be resumed
    runs: Path | None = None  # parent of a folder whose name is chosen
    verbose: bool = False  # print every note before the first step
    ranks: Ranks = ALONE  # the processes that train together; rank 0 alone writes
    shared: Shared | None = None  # set for the runs of a study, which are in memory
    earlier: RunFolder | None = None  # the resumed run
    job: Job | None = None  # the checked run; None before :meth:`bind`
    loop: Loop | None = None  # None before the first event
    outcome: describe.Outcome | None = None  # None before the end
    # the held-out losses, with those of earlier processes
    evaluations: list[events.Evaluated] = field(default_factory=list)
    _emitted: deque[events.Event] = field(default_factory=deque)
    _running: Generator[events.Event] | None = None

    # checks

    def bind(self, prepared: Prepared, plan: Plan | None = None) -> bool:
        """Check OUT, plugins, plan, data and device, cheapest first; writes nothing.

        Args:
            prepared: settings, plugins, machine, and the checkpoint that a new run begins with.
            plan: of the settings and the plugins; None: it is built here.

        Returns:
            False: the run to resume is finished, which is printed.

        Raises:
            Refusal: one of them cannot be used.
            PluginCodeError: a plugin's own code raised while planning.
            OutOfMemory: the model alone does not fit.
        """
        loaded, plugins, branch = prepared.loaded, prepared.plugins, prepared.loaded.branch
        config, detected = loaded.config, prepared.detected
        assert detected is not None
        shown, out, started = self.shown, self.out, datetime.now(UTC)
        earlier = RunFolder.find(out) if self.resume and out is not None else None
        self.earlier = earlier
        if self.ranks.is_main and (out is not None or self.runs is not None):
            given = None if self.runs else out
            record.choose_out(
                config.preset, given, runs=self.runs or record.RUNS, resume=self.resume
            )
        budget = Budget.of(config.train)
        errors.check_step(config.train)
        check_support(plugins, detected.backend, detected.device)
        plan = export_checked(build_plan(loaded, plugins) if plan is None else plan)
        notes = [*loaded.notes, *self.ranks.divide(plan)]
        shard = self.ranks.shard = divides(config.mesh.shard, self.ranks)
        warnings, details, initial = [], [], None
        chosen_here = earlier is None and branch is None  # else the preset is the earlier run's
        if chosen_here and loaded.origins.get("preset") == "device":  # its note has the reason
            details.append(notes.pop(0))
        if earlier:
            with shown.phase("verifying the checkpoint"):
                warnings, known = resume.check_plan(earlier, plan)
                _ = earlier.newest
            notes += known
        if config.init is not None and (earlier is None or earlier.newest is None):
            with shown.phase("reading the weights"):
                initial = Initial.of(config.init, plan)
        with self._building(plugins, f"importing {detected.backend}", "while kernels are chosen"):
            backend = (self.create or create_backend)(detected, plan)
        with self._building(plugins, "reading the data", "while documents are read"):
            if not self.ranks.is_main:  # rank 0 has filled the cache by then
                self.ranks.broadcast()
            if self.shared:
                corpus = self.shared.corpus
            else:
                reports = {"say": notes.append, "detail": details.append}
                corpus = read_corpus(config, self.cache, shown, asked=plan.sourcing, **reports)
            if self.ranks.is_main:
                self.ranks.broadcast()
        chosen = None
        if plan.sourcing.epochs is not None:  # fine-tuning may choose the number of epochs
            choose = required("minillm.tuning", "epochs", "choosing how long a model is tuned")
            chosen = choose(prepared, plan, corpus.train.tokens)
        if chosen is not None:
            plan, config = export_checked(build_plan(chosen, plugins)), chosen.config
            budget, notes = Budget.of(config.train), [*notes, *chosen.notes[len(loaded.notes) :]]
        known = fingerprint(corpus.train, config.data.seed, plan.arrangement)
        corpus = replace(corpus, fingerprint=known)
        if earlier:
            resume.check_data(earlier, corpus, config)
        then = earlier.part("references") if earlier else None
        notes += check_references(plan, corpus.tokenizer, then)
        try:
            when = "in the model's initial values"
            with self._building(plugins, "building the model", when):
                trainer = backend.trainer(plan, config.seed, ranks=self.ranks)
        except (OutOfMemory, MemoryError) as error:
            raise errors.out_of_memory(error, config.train, None, 0) from error
        if (of_vocabulary := vocabulary_note(plan.estimate())) is not None:
            details.append(of_vocabulary)
        if earlier:
            if observing := [*observers(plugins)]:
                notes.append(f"plugins that observe the run start again: {', '.join(observing)}")
            notes += resume.environment_changes(earlier, trainer.binding)
        about = notes, details, warnings, initial, branch
        if self.ranks.size > 1:
            stages, each = self.ranks.pipeline, self.ranks.size // self.ranks.evaluation_part[0]
            does = f"{'updates its share alone, ' * bool(shard)}mesh.shard={shard or 'off'}"
            notes.append(
                f"{self.ranks.size} processes by {self.ranks.transport}: each takes its part of every step's "
                f"rows{f', {each} share each' * (each > 1)}"
                f"{f', and its layers in {stages} pipeline stages' * (stages > 1)} ({does})"
            )
        job = Job(plan, corpus, trainer, *about, started=started, ranks=self.ranks)
        if branch:
            job.begins, job.branched = branch.load(trainer, corpus, config, budget)
        if initial:
            job.branched = tuple(initial.load(trainer))
        if earlier and (why := resume.finished(earlier, budget)) is not None:
            shown.say(f"{out} is finished: {why}")
            return False
        if earlier and earlier.newest:
            job.begins = Position.of(earlier.newest.scalars)
        self.job = job
        return True

    @contextmanager
    def _building(self, plugins: Sequence[LoadedPlugin], phase: str, when: str) -> Iterator[None]:
        """Show a phase in which plugins' code may run, and attribute its errors to them."""
        whose = at_work(plugins)
        with self.shown.phase(phase), attribute_errors(plugins, when), running(lambda: whose(when)):
            yield

    # training

    def steps(self) -> Iterator[events.Event]:
        """Train; yields each event before another step is queued.

        A caller that leaves the iterator pauses the run; the next iterator continues it.

        Raises:
            MinillmError: any end other than completion; run.json has its exit code.
        """
        running = self._started()
        while (event := next(running, None)) is not None:
            yield event  # not `yield from`, which would end the run if a caller breaks off

    def run(self) -> None:
        """Train to the end; an error between two events, such as Ctrl-C, ends the run too."""
        running = self._started()
        try:
            for _ in running:
                pass
        except BaseException as error:
            if inspect.getgeneratorstate(running) != inspect.GEN_CLOSED:
                running.throw(error)
            raise

    def close(self) -> None:
        """End the run at this step and release the folder."""
        if self._running is not None:
            self._running.close()

    def save(self) -> None:
        """Write a checkpoint of the current model, unless this step has one.

        Raises:
            MinillmError: the checkpoint could not be written.
        """
        if self.loop is not None and not (self._over and self.loop.position.saved == self.step):
            self._refuse_over()
            self.loop.save()

    @property
    def step(self) -> int:
        """Optimizer steps that the model has taken."""
        assert self.job is not None
        return self.loop.position.step if self.loop is not None else self.job.begins.step

    @property
    def _warn(self) -> Callable[[str], None]:
        return self.shared.warn if self.shared else self.shown.say

    def _started(self) -> Generator[events.Event]:
        if self._running is None:
            assert self.job is not None
            self._running = self._run(self.job)
        if self.outcome is None:  # else it is done: there is nothing to train
            self._refuse_over()
        return self._running

    @property
    def _over(self) -> bool:
        state = self._running and inspect.getgeneratorstate(self._running)
        return state == inspect.GEN_CLOSED

    def _refuse_over(self) -> None:
        if self._over:
            fix = "Run.open(out) resumes from its newest checkpoint; Run(plan) begins again"
            raise Refusal("the run has ended", where=f"step {self.step}", fix=fix)

    def _run(self, job: Job) -> Generator[events.Event]:
        """Train in the folder, under its lock; or in memory."""
        announced, given = self.out, None if self.runs else self.out
        if announced is None or not self.ranks.is_main:
            self._describe(job)
            position, before = job.begins, ()
            if announced is not None and (saved := self.ranks.broadcast()):  # rank 0 has found it
                position = resume.load(Checkpoint(Path(saved[0]), saved[1]), job.trainer)
            if announced is not None:
                before, at_once = self.ranks.broadcast()
                if at_once and self.ranks.shard:
                    job.trainer.snapshot()
            evidence = Evidence.of(job, self._warn)
            yield from self._train(job, None, position, before, evidence, {})
            if self.shared is None:
                evidence.warn()
            return
        self.out = record.claim_out(
            job.config.preset, given, runs=self.runs or record.RUNS, resume=self.resume
        )
        if self.out != announced:
            self.shown.say(f"another run took {announced} in the meantime: writing to {self.out}")
        with lock(self.out, self.shown.say) as held:
            if not self.resume:  # a run may have begun and ended since the check
                record.refuse_taken(self.out)
            self._describe(job)
            yield from self._train_in_folder(job, held)

    def _describe(self, job: Job) -> None:
        for line in (*describe.start(job, verbose=self.verbose), *job.branched):
            self.shown.say(line)
        if job.plan.frozen and not (self.resume or job.initial or job.branch):
            self.shown.say(
                "warning: frozen parameters keep their random initial values: start from "
                "trained ones, with --init RUN or DIR"
            )

    def _train_in_folder(self, job: Job, held: RunLock) -> Iterator[events.Event]:
        """Train in a folder, and keep its run.json up to date."""
        earlier, out, say = self.earlier, held.out, self.shown.say
        commit.sweep(out)
        if earlier is None and (kept := commit.archive_orphans(out)) is not None:
            say(f"found checkpoints of an unknown run, now kept in {kept.name}")
        position, checkpoint = job.begins, None
        with self.shown.phase("loading the checkpoint") if self.resume else nullcontext():
            if self.resume:
                position, checkpoint = Position(), resume.newest(out, earlier, say)
            # all ranks load at once: with a sharded optimizer they synchronise here
            self.ranks.broadcast(checkpoint and [str(checkpoint.path.absolute()), checkpoint.step])
            if checkpoint is not None:
                position = resume.load(checkpoint, job.trainer)
                say(f"resumed after step {position.step:,} from {checkpoint.path.name}")
        before = truncate(out / METRICS, position.step if job.branch is None else -1)
        # before run.json, so that a branch that was killed always has a checkpoint to resume
        at_once = job.branch is not None and job.config.checkpoint.every != 0
        self.ranks.broadcast([before, at_once])
        tokenizer = keep_tokenizer(out, job.corpus.tokenizer, earlier, say)
        constants = {
            "tokenizer": tokenizer,
            "seed": job.config.seed,
            "plan_hash": job.plan.hash,
            "fingerprint": job.corpus.fingerprint,
        }
        if at_once:
            scalars, snapshot = {**position.data(), **constants}, job.trainer.snapshot()
            commit.commit(out, position.step, snapshot(), scalars, beside=snapshot.beside)
            position.saved = position.step
        evidence = Evidence.of(job, say)
        text = document.settings_file(job.config, document.remarks(job, earlier))
        with record.unwritable(out / TOML):
            disk.replace(out / TOML, text.encode())
        run_json = record.Record(out, document.document(job, earlier, position, tokenizer))
        first = position.step
        try:
            yield from self._train(job, held, position, before, evidence, constants)
        except BaseException as error:
            ending = error
            if isinstance(error, KeyboardInterrupt):
                ending = errors.interrupted(out, self.stop, job.plugins)
            if isinstance(error, GeneratorExit):  # the caller closed the iterator
                saved = self.loop.position.saved if self.loop else None
                ending = Interrupted("") if saved is None else Stopped("")
            if held.is_ours():  # else it is another run's record, or missing
                try:
                    run_json.update(exit=errors.exit_code(ending), **document.ended(job))
                except MinillmError as another:  # the error that ended the run is the one to report
                    say(f"warning: {another.what}")
                # after a failure of the device this may fail too
                with suppress(Exception):
                    run_json.update(plugins=document.plugin_records(job, evidence))
            if ending is error or isinstance(error, GeneratorExit):
                raise
            raise ending from None
        plugins = document.plugin_records(job, evidence)
        made = self.outcome
        assert made is not None
        run_json.update(exit=0, plugins=plugins, **document.ended(job, made.evaluated))
        evidence.warn()
        if made.speed is not None:
            self._record_speed(job, made.speed.real, made.steps - first)
        for line in (*describe.end(job, out, made), *describe.next_steps(job, out, made)):
            say(line)
        self.stop.patient = False

    def _record_speed(self, job: Job, speed: float, steps: int) -> None:
        """Record the speed of a finished run, if a distribution offers to."""
        try:
            if (remember := provided(MEASURED, "remember")) is not None:
                ran = job.plan, job.trainer.binding, job.corpus.train.tokens
                remember(self.cache, *ran, speed, steps=steps)
        except Exception as error:  # the run is over, and all of it is saved
            self.shown.say(f"warning: the speed of the run is not kept: {plain(str(error))}")

    def _train(
        self,
        job: Job,
        held: RunLock | None,
        position: Position,
        before: Sequence[Mapping[str, Any]],
        evidence: Evidence,
        constants: Mapping[str, Any],
    ) -> Iterator[events.Event]:
        """Train from a position to the end.

        Args:
            job: the run.
            held: its folder, locked; None: nothing is written.
            position: where to begin.
            before: lines of metrics.jsonl up to there.
            evidence: checks that the plugins take part.
            constants: scalars of every checkpoint.
        """
        stop, shown, config, trainer = self.stop, self.shown, job.config, job.trainer
        budget = Budget.of(config.train)
        self.evaluations = _evaluations(before)
        cost = job.plan.estimate()
        meter = Meter(
            flops_per_token=cost.flops_per_token,
            flops_per_label=cost.flops_per_label,
            peak_flops=self.ranks.size * (trainer.binding.peak_flops or 0.0) or None,
        )
        trend = Trend(shown.say)
        trend.resume(before, self.evaluations)
        evaluating, saving = Stopwatch(shown.clock), Stopwatch(shown.clock)
        with ExitStack() as stack:

            def forget(event: events.Event) -> None:
                """Drop the evaluations after the checkpoint that the run was rewound to."""
                if isinstance(event, events.Rewound):
                    self.evaluations[:] = [e for e in self.evaluations if e.step <= event.to]
                    trend.restart(self.evaluations)

            core, checks = [evidence, shown, trend, forget, self._emitted.append], []
            if held is not None:
                metrics = Metrics(held.out / METRICS, every=config.log.every)
                core.insert(0, stack.enter_context(metrics))
                checks = [held.check, metrics.check]
            stack.enter_context(watching(shown.say))
            feed = Feed(job, position.cursor or None, lambda: loop.ending, step=position.step)
            stack.enter_context(feed)
            own = observers(job.plugins if self.ranks.is_main else ())
            emit = Observers(core, own, say=self._warn, seen=job.seen, raised=job.raised)

            def check() -> None:
                """Refuse to write where the folder, its metrics.jsonl or the data are no longer the run's."""
                for one in (*checks, job.corpus.check_unchanged):
                    one()

            rewinds = {"skip": config.train.skip, "feed": feed}
            checkpoints = CheckpointManager(
                emit, shown.say, check, self.ranks, trainer, waiting=saving, **rewinds
            )
            if held is not None:
                checkpoints.open(held.out, config, constants, self.evaluations)
                checkpoints.begun = position.saved
                stack.callback(lambda: checkpoints.close(now=stop.hurried))
            # the best checkpoint is chosen by all windows: losses of a part compare only with that part's
            on_the_way = 1.0 if config.checkpoint.best else config.eval.share
            whole, part = (
                validation(
                    job,
                    config.eval.tokens,
                    share=share,
                    cancelled=lambda: loop.ending,
                    progress=shown.evaluating,
                )
                for share in (1.0, on_the_way)
            )
            samples = Samples(job, stop, shown)

            model = Predictor(trainer, config, job.corpus.tokenizer, job.hook())

            def evaluate(step: int) -> events.Evaluated | None:
                with evaluating:
                    last = budget.spent(step, loop.elapsed)
                    found = (whole if last else part)(step)
                    if found is not None:
                        with trainer.inference_context():
                            if self.ranks.is_main:
                                found = with_verdicts(job.plugins, found, self.evaluations, model)
                        verdicts, why = self.ranks.broadcast([found.verdicts, found.stop])
                        found = replace(found, verdicts=verdicts, stop=why)
                        if found.stop and not last and on_the_way < 1:  # with all windows
                            last, given = True, {"verdicts": found.verdicts, "stop": found.stop}
                            found = replace(whole(step) or found, **given)
                    if found is not None and last and trend.best is not None and on_the_way < 1:
                        # compare with the evaluations on the way, which have the same windows
                        trend.take(part(step) or found)
                self.evaluations += [found] if found else []
                return found

            def write_samples(step: int, is_last: bool) -> Iterator[events.Event]:
                wanted, given = config.eval.samples, len(config.eval.prompts)
                at_the_end = max(2, given) if is_last and held and wanted != 0 else 0
                with evaluating, trainer.inference_context():
                    if self.ranks.is_main:
                        yield from samples(step, max(wanted or 0, at_the_end))

            every, minutes = config.checkpoint.every, config.checkpoint.minutes
            cadence = Cadence(config.eval.every, every, minutes)
            if config.train.spike:  # a rewind must not depend on the clock
                cadence = replace(cadence, minutes=0.0, settle=0.0)
            newest = self.evaluations[-1] if self.evaluations else None
            loop = self.loop = Loop(
                trainer,
                feed,
                job.plan.values,
                budget,
                emit,
                cadence=cadence,
                evaluate=evaluate,
                samples=write_samples,
                checkpoints=checkpoints,
                spike=config.train.spike,
                stop=stop,
                meter=meter,
                position=position,
                evaluated=newest.step if newest else None,
                stopped=newest.stop if newest and newest.step == position.step else "",
                contain=lambda: _attributed(job, lambda: loop.position.step + 1),
                at_work=at_work(job.plugins),
                shown=shown,
                ranks=self.ranks,
            )
            first = "compiling the first step" if trainer.binding.compile else "the first step"
            shown.train(
                Course(
                    lambda: loop.progress,
                    config.train.steps,
                    epochs=lambda tokens: (tokens - position.before) / job.corpus.train.tokens,
                    bytes_per_token=bytes_of_a_token(job),
                    vocab=config.model.vocab,
                    first=first,
                )
            )
            trainer.phase = shown.phase
            settings, out = config.model_dump(mode="json"), str(held.out) if held else ""
            parameters, steps = job.plan.num_parameters, config.train.steps
            emit(events.Started(job.plan.hash, steps, parameters, out, settings))
            if held is not None and position.saved is not None and job.branch is None:
                folder = layout.folder(held.out, position.step)
                emit(events.Resumed(position.step, str(folder.relative_to(held.out))))
            stop.patient = True  # from here on a first signal finishes the step and saves
            began = shown.clock()
            due = self.shared is None and _evaluation_is_due(config, budget, position)
            running = loop.steps(evaluate_first=due)
            for _ in running:
                try:
                    yield from self._drained()
                except GeneratorExit:
                    running.close()
                    raise
                except BaseException as error:  # the caller's, such as Ctrl-C: it ends the run
                    running.throw(error)
            spent = shown.clock() - began
        yield from self._drained()
        evidence.gather()
        self.outcome = describe.Outcome(
            steps=loop.position.step,
            evaluated=self.evaluations[-1] if self.evaluations else None,
            trend=trend,
            speed=meter.overall(),
            preparing=began - shown.began,
            training=spent - evaluating.seconds - saving.seconds,
            evaluating=evaluating.seconds,
            saving=saving.seconds,
            prompts=samples.prompts,
            read=loop.position.tokens - loop.position.before,
            packed=loop.position.cursor.get("packed", {}).get("counts"),
        )

    def _drained(self) -> Iterator[events.Event]:
        while self._emitted:
            yield self._emitted.popleft()


@contextmanager
def _attributed(job: Job, step: Callable[[], int]) -> Iterator[None]:
    """Attribute errors to plugins, and add advice to errors of memory."""
    try:
        with attribute_errors(job.plugins, "in a step"), job.ranks.collective_errors():
            yield
    except NonFinite as error:
        names, found = errors.suspects(job)
        error.where = "; ".join(filter(None, (error.where, found))) or None
        error.fix = errors.remedies(job.config.train, names)
        raise
    except (OutOfMemory, MemoryError) as error:
        peak = job.trainer.peak_bytes()
        raise errors.out_of_memory(error, job.config.train, peak, step()) from error


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> list[events.Evaluated]:
    """List the evaluations by earlier processes of the run, up to the step where it resumes."""
    known = {one.name for one in fields(events.Evaluated)}
    return [
        events.Evaluated(**{key: value for key, value in one.items() if key in known})
        for one in lines
        if one.get("event") == events.Evaluated.event and isinstance(one.get("val_loss"), float)
    ]


def _evaluation_is_due(config: Config, budget: Budget, position: Position) -> bool:
    """Return whether an evaluation is due at the step where this process begins, made or not."""
    every, step = config.eval.every, position.step
    if step == 0:
        return every != 0
    parts = [budget.part(EVALUATIONS, at, position.elapsed) for at in (step - 1, step)]
    return Cadence(every).evaluates(step, sixth=parts[0] < parts[1])


class Stopwatch:
    """A context manager that adds up the seconds spent inside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began, self.seconds = clock, 0.0, 0.0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *error: object) -> None:
        self.seconds += self._clock() - self._began


class Samples:
    """A sample writer of a run: neither a plugin's error nor a signal in a sample ends the run.

    Args:
        job: has the model, the tokenizer and the prompts.
        stop: ends a sample early.
        shown: the console.
    """

    def __init__(self, job: Job, stop: StopRequest, shown: Display) -> None:
        self._job, self._stop, self._shown = job, stop, shown
        tokenizer, given = job.corpus.tokenizer, list(job.config.eval.prompts)
        self.prompts: list[str] = []
        self._asked = self._question_source()
        if self._asked is not None:
            self.prompts = given or self._asked.held_out(job.corpus.val, 2)
        elif tokenizer is not None:
            self.prompts = given or prompts(job.corpus.val, tokenizer, 2) or [""]

    def _question_source(self) -> Any | None:
        """Build the question source that replaces prompts, if the plan's source has one; else None.

        An entry point of the group ``minillm.questions`` names its class. It is called with the plan's
        sourcing, the tokenizer, and the ids of special tokens by name, and has
        ``held_out(documents, count)``, ``ids(question)`` up to where the answer begins, and ``ends``.
        """
        asked, corpus = self._job.plan.sourcing, self._job.corpus
        if asked.prompt is None or corpus.tokenizer is None:
            return None
        if (found := provided("minillm.questions", "chats")) is None:
            how = installing(["minillm-chat"])
            self._shown.say(f"note: samples continue texts, and answer no questions: {how}")
            return None
        return found(asked, corpus.tokenizer, corpus.specials)

    def __call__(self, step: int, count: int) -> Iterator[events.Sampled]:
        """Yield ``count`` samples, cycling through the prompts."""
        job, tokenizer = self._job, self._job.corpus.tokenizer
        if tokenizer is None or not self.prompts:
            return
        hook, asked = job.hook(), self._asked
        writer = TextGenerator(job.trainer, tokenizer, job.config.train.seq_len, hook)
        for number in range(count):
            if self._stop.requested:  # the user wants the terminal back
                return
            prompt, phase = self.prompts[number % len(self.prompts)], "writing a sample"
            try:
                with self._shown.phase(phase), attribute_errors(job.plugins, "in a sample"):
                    stopped, seed = lambda: self._stop.requested, job.config.seed + number
                    begins, ends = (asked.ids(prompt), asked.ends) if asked else (prompt, ())
                    text = sample(writer, begins, ends=ends, seed=seed, stopped=stopped)
            except MinillmError as error:
                self._shown.say(f"warning: no sample: {error}")
                return
            except KeyboardInterrupt:  # it cuts only the sample short
                return
            yield events.Sampled(step, prompt, text.lstrip() if asked else text, bool(asked))
