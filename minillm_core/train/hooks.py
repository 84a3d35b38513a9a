"""The plugin hooks that run during training; an error is raised or contained under its plugin's name."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import numpy as np

from minillm_core.data import Batch, OnBatch
from minillm_core.data.batch import checked
from minillm_core.errors import DataError, PluginCodeError, Refusal
from minillm_core.plan.plan import BATCH, Plan
from minillm_core.plugins.attribution import shown_frames
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.sourcing import Field
from minillm_core.plugins.streams import Streams
from minillm_core.text import plain
from minillm_core.train.events import Evaluated, Event, Started
from minillm_core.train.predict import Predictor


def plan_hook(
    plan: Plan,
    plugins: Iterable[LoadedPlugin] | None = None,
    *,
    seen: Counter[str] | None = None,
    streams: Streams | None = None,
    progress: Callable[[], float] = lambda: 1.0,
    specials: Mapping[str, int] | None = None,
    pieces: tuple[bytes, ...] = (),
) -> OnBatch | None:
    """Compose the plugins' ``on_batch`` into one function of (batch, phase), as a run of the plan does.

    Args:
        plan: sets the order of the calls, the fields that they add to a batch, and the vocabulary
            size, the upper bound of ids and labels.
        plugins: those of the plan, in any order; default: the ones that the plan holds.
        seen: takes counts of ``batch:<plugin>``, and of ``unlabelled:<plugin>`` for each batch of an
            evaluation whose last label the plugin removed.
        streams: the plugins' random streams; default: new ones, for phases other than train, where
            they restart at every batch.
        progress: called once for each batch of phase train: the progress of the run, 0..1.
        specials: the ids of the special tokens that plugins asked for, by name; default: those of a
            tokenizer that is trained here.
        pieces: the bytes of each id, as many as the vocabulary has; empty if no tokenizer is known.

    Returns:
        The function, which raises PluginCodeError if a plugin raises or returns no batch of the
        input's shape; None if no plugin has the hook. Fields that a source declares are 0 if
        the batch has none, as in phase decode.
    """
    counted = Counter() if seen is None else seen
    vocab, asked = plan.config.model.vocab, plan.sourcing
    drawn = streams or Streams(plan.config.seed)
    ids = dict(asked.ids if specials is None else specials)
    declared: dict[str, list[Field]] = {}
    for _, owner, one in plan.batch_fields:
        declared.setdefault(owner, []).append(one)
    by_name = {one.name: one for one in (plan.active if plugins is None else plugins)}
    chain, given = [by_name[name] for name in plan.on_batch], asked.batch_fields
    known = {*BATCH, *(name for name, _, _ in plan.batch_fields)}
    if not (chain or given):
        return None

    def on_batch(batch: Batch, phase: str) -> Batch:
        if lacking := [one for one in given if one.name not in batch]:
            batch = batch | {one.name: np.zeros(batch["ids"].shape, one.dtype) for one in lacking}
        shape, share = batch["ids"].shape, progress() if phase == "train" else 1.0
        for one in chain:
            hook, labelled = f"on_batch, phase {phase}", phase == "eval" and _labelled(batch)
            there, weighted = known.union(batch), "weights" in batch
            with one.contain(hook), drawn.of(one.name, phase):
                batch = one.call(
                    "on_batch",
                    batch=batch,
                    phase=phase,
                    vocab=vocab,
                    progress=share,
                    specials=dict(ids),
                    pieces=pieces,
                )
            try:
                _fields(checked(batch, vocab), declared.get(one.name, ()), there)
            except DataError as error:
                raise _error(one, hook, "broke the batch in", error.what, error.fix) from error
            if one.plugin.manifest.unweighted and "weights" in batch and not weighted:
                fix = "leave unweighted=True out of the class statement"
                raise _error(one, hook, "gave weights to", "a batch that had none", fix)
            if batch["ids"].shape != shape:
                where = f"'ids' {batch['ids'].shape}, not {shape}"
                fix = (
                    "keep the batch's shape (rows, T): -1 as a label drops a position in phase "
                    "train; train.rows and train.seq_len set the shape"
                )
                raise _error(one, hook, "changed the rows or columns in", where, fix)
            counted[f"batch:{one.name}"] += 1
            if labelled and not _labelled(batch):
                counted[f"unlabelled:{one.name}"] += 1
        return batch

    return on_batch


def _error(one: LoadedPlugin, hook: str, did: str, where: str, fix: str | None) -> PluginCodeError:
    offered_by = one.origin.offered_by
    return PluginCodeError(one.name, hook, did=did, offered_by=offered_by, where=where, fix=fix)


def _labelled(batch: Batch) -> bool:
    return bool((batch["labels"] >= 0).any())


def _fields(batch: Batch, fields: Sequence[Field], known: Collection[str]) -> None:
    """Check the fields that a plugin declared: present, of the declared dtype, and finite.

    Raises:
        DataError: a field is not, or one is neither declared nor among those that were there.
    """
    for name in sorted({*batch} - {*known}):
        what = f"on_batch added '{name}', which no build_data declares: no module could read it"
        raise DataError(what, fix=f"data.field('{name}', '{batch[name].dtype}') in build_data")
    for one in fields:
        array, shape = batch.get(one.name), (*batch["ids"].shape, *one.shape)
        if array is None or array.dtype != one.dtype or array.shape != shape:
            got = "nothing" if array is None else f"{array.dtype} {array.shape}"
            what = f"on_batch gave {got} as '{one.name}', not {one.dtype} {shape}"
            raise DataError(what, fix="write the field that build_data declares")
    for name, array in batch.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            what = f"on_batch gave {array[place]} as '{name}' at {place}"
            raise DataError(what, fix="a batch holds finite numbers; a mask is an int32 field")


@dataclass(frozen=True)
class Verdict:
    """A plugin's result for an evaluation."""

    figures: Mapping[str, float] = field(default_factory=dict)  # name -> number, finite
    stop: str = ""  # why the run ends here, as a completed one; empty: it continues


def with_verdicts(
    plugins: Iterable[LoadedPlugin],
    evaluated: Evaluated,
    history: Sequence[Evaluated],
    model: Predictor,
) -> Evaluated:
    """Add the verdicts of the plugins' ``on_evaluated`` to an evaluation.

    Args:
        plugins: those of the run.
        evaluated: the evaluation.
        history: the evaluations before it, of earlier processes too.
        model: the model with its current weights.

    Raises:
        PluginCodeError: a plugin's code raised, or returned an invalid verdict.
    """
    figures, stops = dict[str, float](), list[str]()
    for one in plugins:
        if "on_evaluated" not in one.plugin.hooks:
            continue
        hook = f"on_evaluated after step {evaluated.step}"
        given = {"evaluated": evaluated, "history": tuple(history), "model": model}
        with one.contain(hook):
            try:
                found = one.call("on_evaluated", **given)
            except Refusal as error:  # of a function of the core that it called: nothing is refused
                raise one.error(hook, shown_frames(error, one.root), error) from error
        verdict = Verdict() if found is None else found
        if wrong := _no_verdict(verdict):
            fix = "return Verdict(figures={name: number}, stop=reason), or None"
            raise _error(one, hook, "returned no verdict from", wrong, fix)
        figures |= {f"{one.name}.{name}": float(n) for name, n in verdict.figures.items()}
        stops += [f"{one.name}: {plain(verdict.stop, 160)}"] if verdict.stop else []
    return replace(evaluated, verdicts=figures, stop="; ".join(stops))


def _no_verdict(found: object) -> str | None:
    """Return the reason why a value is not a valid verdict; None: it is one."""
    if not (
        isinstance(found, Verdict)
        and isinstance(found.figures, Mapping)
        and isinstance(found.stop, str)
    ):
        return f"{found!r}"[:160]
    wrong = [
        f"{name!r}: {number!r}"
        for name, number in found.figures.items()
        if not (isinstance(name, str) and name.isidentifier() and np.ndim(number) == 0)
        or np.asarray(number).dtype.kind not in "biuf"
        or not np.isfinite(number)
    ]
    return f"figures {', '.join(wrong)}"[:160] if wrong else None


def observers(plugins: Iterable[LoadedPlugin]) -> dict[str, Observer]:
    """Map each plugin to its ``on_event``."""
    return {one.name: partial(_observe, one) for one in plugins if "on_event" in one.plugin.hooks}


def _observe(one: LoadedPlugin, event: Event) -> None:
    step = getattr(event, "step", None)
    of = "" if step is None else f" of step {step}"
    with one.contain(f"on_event for '{event.event}'{of}"):
        one.call("on_event", event=event)


STRIKES = 3
"""Number of errors after which an observer is switched off."""

Observer = Callable[[Event], None]


@dataclass(frozen=True)
class ObserverErrors:
    """The errors of an observer that raised."""

    times: int
    last: str  # the last error, with its line

    @property
    def off(self) -> bool:
        """Whether the observer is switched off."""
        return self.times >= STRIKES


@dataclass(eq=False)
class Observers:
    """A composed observer that passes every event to the core's observers, then to the plugins'.

    An error of a core observer ends the run: a run must not lose its metrics.jsonl.
    """

    core: Sequence[Observer]  # called first, in order
    plugins: Mapping[str, Observer]  # name -> ``on_event``, contained; called in order of names
    _: KW_ONLY
    say: Callable[[str], None]  # prints a line about an error
    seen: Counter[str]  # ``event:<plugin>`` -> events that it took; the evidence reads it
    # plugin -> the errors of its ``on_event``; the evidence reads it
    raised: dict[str, ObserverErrors] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Pass an event to every observer.

        Any exception of a plugin's observer is isolated, SystemExit too; each plugin's observer gets its
        own copy of the event.
        """
        for observer in self.core:
            observer(event)
        for name, observer in sorted(self.plugins.items()):
            if name in self.raised and self.raised[name].off:
                continue
            try:
                observer(copy.deepcopy(event))
            except Exception as error:  # contained: SystemExit and its like become the cause
                self._record_error(name, event, error)
            else:
                self.seen[f"event:{name}"] += not isinstance(event, Started)  # which is only noted

    def _record_error(self, name: str, event: Event, error: Exception) -> None:
        before = self.raised.get(name)
        count = before.times + 1 if before else 1
        said, cause = f"plugin '{name}' raised in on_event for '{event.event}'", error
        if isinstance(error, PluginCodeError):
            said, cause = error.what, error.__cause__
        last = plain(f"{type(cause).__name__}: {cause}", 160) + _place(error)
        self.raised[name] = ObserverErrors(count, last)
        self.say(f"warning: {said} ({count} of {STRIKES}): {last}")
        if self.raised[name].off:
            self.say(f"warning: plugin '{name}' gets no more events; the run continues")


def _place(error: Exception) -> str:
    """Return the plugin's innermost line, if it is known."""
    where = error.where if isinstance(error, PluginCodeError) else None
    frames = (where or "").splitlines()[:-1]  # the last line is the error itself
    return f", at {frames[-1].strip()}" if frames else ""
