"""The two hooks that run during training, each plugin's contained under its own name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minillm_core.data import Batch, OnBatch
from minillm_core.data.batch import checked
from minillm_core.errors import DataError, PluginCodeError
from minillm_core.plugins.builders.data import Field
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.streams import Streams
from minillm_core.train.events import Event
from minillm_core.train.observers import Observer, Observers

if TYPE_CHECKING:
    from minillm_core.train.job import Job

__all__ = ["batch_hook", "observers", "observers_of"]


def batch_hook(
    order: Sequence[str],
    plugins: Iterable[LoadedPlugin],
    seen: Counter[str],
    vocab: int,
    streams: Streams,
    fields: Sequence[tuple[str, str, Field]] = (),
) -> OnBatch | None:
    """All ``on_batch`` as one function, called in ``order``; None where there is none.

    It raises PluginCodeError where a plugin's code raises or returns what is no batch.

    Args:
        order: names of plugins, from the plan.
        plugins: those of the run.
        seen: ``batch:<plugin>`` is counted there.
        vocab: ids and labels are below it.
        streams: the random numbers that they draw from.
        fields: name, plugin and declaration of what they add to a batch, from the plan.
    """
    declared: dict[str, list[Field]] = {}
    for _, owner, field in fields:
        declared.setdefault(owner, []).append(field)
    by_name = {one.name: one for one in plugins}
    chain = [by_name[name] for name in order]
    if not chain:
        return None

    def on_batch(batch: Batch, phase: str) -> Batch:
        shape = batch["ids"].shape
        for one in chain:
            hook = f"on_batch, phase {phase}"
            with one.contain(hook), streams.of(one.name, phase):
                batch = _call(one.plugin.on_batch, batch=batch, phase=phase, vocab=vocab)  # type: ignore[attr-defined]
            try:
                _fields(checked(batch, vocab), declared.get(one.name, ()))
            except DataError as error:
                raise PluginCodeError(
                    one.name,
                    hook,
                    did="broke the batch in",
                    offered_by=one.origin.offered_by,
                    where=error.what,
                    fix=error.fix,
                ) from error
            if phase == "decode" and batch["ids"].shape != shape:
                raise PluginCodeError(
                    one.name,
                    hook,
                    did="changed the columns in",
                    offered_by=one.origin.offered_by,
                    where=f"'ids' {batch['ids'].shape}, not {shape}",
                    fix="drop and pack in phase train alone",
                )
            seen[f"batch:{one.name}"] += 1
        return batch

    return on_batch


def _fields(batch: Batch, fields: Sequence[Field]) -> None:
    """What a plugin declared that it writes is there, as it was declared, and finite.

    Raises:
        DataError: it is not.
    """
    for field in fields:
        array, shape = batch.get(field.name), (*batch["ids"].shape, *field.shape)
        if array is None or array.dtype != field.dtype or array.shape != shape:
            got = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise DataError(
                f"on_batch gave {got} as '{field.name}', not {field.dtype} {shape}",
                fix="write what build_data declares",
            )
    for name, array in batch.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise DataError(
                f"on_batch gave {array[place]} as '{name}' at {place}",
                fix="a batch holds finite numbers; a mask is an int32 field",
            )


def observers_of(job: Job, core: Sequence[Observer], *, say: Callable[[str], None]) -> Observers:
    """Everyone who is told of a job's events: the core's own, and each plugin's ``on_event``.

    Args:
        job: its plugins, and what is kept of them.
        core: called first, in order.
        say: is told of errors.
    """
    return Observers(core, observers(job.plugins), say=say, seen=job.seen, raised=job.raised)


def observers(plugins: Iterable[LoadedPlugin]) -> dict[str, Observer]:
    """Plugin -> its ``on_event``."""
    return {one.name: _observer(one) for one in plugins if "on_event" in one.plugin.hooks}


def _observer(one: LoadedPlugin) -> Observer:
    def on_event(event: Event) -> None:
        step = getattr(event, "step", None)
        of = "" if step is None else f" of step {step}"
        with one.contain(f"on_event for '{event.event}'{of}"):
            _call(one.plugin.on_event, event=event)  # type: ignore[attr-defined]

    return on_event


def _call(hook: Callable, **arguments: object):
    """Call a hook, which may leave arguments out, as pluggy allows."""
    taken = hook.__code__.co_varnames[1 : hook.__code__.co_argcount]
    return hook(**{name: arguments[name] for name in taken})
