"""Evidence that a plugin took part: the traces that its part of the plan must leave, and those found.

The plan lists the expected traces of each plugin, as witness keys:

    node:<path>         its forward ran while the step was traced, or in the first eager step
    stage:<rule>.<name> updates of parameters went through it
    parameter:<name>    a gradient reached it
    kernel:<op>=<name>  the op ran through this candidate
    batch:<plugin>      its ``on_batch`` saw batches
    event:<plugin>      its ``on_event`` took events
    slot:<slot>         a number, an order or a packer, which takes part by being in the plan

Other keys are looked up among the trainer's witnesses by the same rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

from minillm_core.backends.base import Trainer
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.errors import NoEvidence
from minillm_core.text import counted, few
from minillm_core.train.events import Event, Stepped
from minillm_core.train.hooks import ObserverErrors
from minillm_core.train.job import Job

STEPS = 10
"""Steps after which a plugin that left no trace ends the run."""

SHOWN = 8  # keys that a record lists


@dataclass(eq=False)
class Evidence:
    """A core observer that checks for traces after ten steps, and again for the record.

    Args:
        expected: plugin -> the keys that its part of the plan must leave.
        trainer: holds witnesses, and parameters if any is expected to move.
        seen: live counts of ``batch:`` and ``event:`` keys.
        say: prints a line about missing evidence.
        raised: live; plugin -> the errors of its observer.
        ranks: the processes that train together; all of them observe.
    """

    expected: Mapping[str, Sequence[str]]
    trainer: Trainer
    _: KW_ONLY
    seen: Counter[str]
    say: Callable[[str], None]
    raised: Mapping[str, ObserverErrors] = field(default_factory=dict)
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.expected = {name: tuple(keys) for name, keys in sorted(self.expected.items())}
        self._elsewhere = Counter[str]()
        keys = {key for keys in self.expected.values() for key in keys}
        self._names = {key.partition(":")[2] for key in keys if key.startswith("parameter:")}
        arrays, moments = self._arrays()
        self._initial = {  # the others have moments, whose tables are too large to be copied
            name: deepcopy(arrays[key])
            for name in self._names
            if not moments[name] and (key := f"model.{name}") in arrays
        }
        self._records: dict[str, dict[str, Any]] | None = None
        self._steps = 0  # of this process: a resumed run is checked again

    @classmethod
    def of(cls, job: Job, say: Callable[[str], None]) -> Self:
        """Build the evidence for a job's plan; ``say`` prints a line."""
        expected = {planned.name: planned.expected for planned in job.plan.plugins}
        more = {"seen": job.seen, "say": say, "raised": job.raised, "ranks": job.ranks}
        return cls(expected, job.trainer, **more)

    def __call__(self, event: Event) -> None:
        """Check the traces once, after ten steps.

        Raises:
            NoEvidence: a plugin left nothing at all.
        """
        if not isinstance(event, Stepped) or self._records is not None:
            return
        self._steps += 1
        if self._steps < STEPS:
            return
        self.gather()
        self._records = self._trace_records()
        for name, record in self._records.items() if self.ranks.is_main else ():
            if not record["shown"]:
                raise self._no_trace_error(name)
            # a plugin may offer kernels for many devices; one in use here is enough
            missing = [key for key in record.get("missing", ()) if not key.startswith("kernel:")]
            if missing:
                self.say(f"warning: no trace of plugin '{name}' in {few(missing)}")

    def gather(self) -> None:
        """Gather the traces of the other ranks; once, and at the same step on all of them."""
        if self.ranks.size > 1 and not self._elsewhere and self.expected:
            keys = sorted({key for keys in self.expected.values() for key in keys})
            here = Counter(self.trainer.witnesses()) + self._updated()
            each = self.ranks.all_gather([here[key] for key in keys])
            sums = zip(keys, map(sum, zip(*each, strict=True)), strict=True)
            found = {key: int(count) for key, count in sums if not here[key]}
            self._elsewhere.update({"": 1} | found)

    def records(self) -> dict[str, dict[str, Any]]:
        """Map each plugin to ``{"shown": bool, "what": [...]}``, with ``missing`` if a trace is missing.

        The result of the check after ten steps; a shorter run is checked now. ``switched_off`` holds the
        last error of an observer that raised too often.
        """
        records = self._trace_records() if self._records is None else self._records
        off = self._switched_off()
        return {
            name: record | ({"switched_off": off[name].last} if name in off else {})
            for name, record in records.items()
        }

    def warn(self) -> None:
        """Warn at the end of observers that were switched off, and of traces that a short run lacks."""
        for name, raised in self._switched_off().items():
            self.say(
                f"warning: plugin '{name}' was switched off during the run, "
                f"because its on_event raised {raised.times} times: {raised.last}"
            )
        if self._records is not None:
            return
        for name, record in self._trace_records().items():
            if not record["shown"] and name not in self._switched_off():
                self.say(
                    f"warning: there is no evidence yet that plugin '{name}' took part; "
                    f"it takes {STEPS} steps to be sure"
                )

    def _switched_off(self) -> dict[str, ObserverErrors]:
        return {name: raised for name, raised in sorted(self.raised.items()) if raised.off}

    def _no_trace_error(self, name: str) -> NoEvidence:
        """Build the error for a plugin that left no trace, with the error that its observer raised, if any."""
        raised = self.raised.get(name)
        if raised is not None:
            off = " and was switched off" if raised.off else ""
            return NoEvidence(
                f"plugin '{name}' was named, but handled no event in {counted(self._steps, 'step')}: "
                f"its on_event raised {counted(raised.times, 'time')}{off}",
                where=raised.last,
                fix=f"correct its on_event, or leave out '{name}'",
            )
        expected = ", ".join(self.expected[name][:3]) or "nothing: it changes nothing"
        return NoEvidence(
            f"plugin '{name}' was named, but after {counted(self._steps, 'step')} nothing shows "
            "that it took part",
            where=f"expected: {expected}",
            fix=f"leave out '{name}', or check its options: minillm plugins info {name}",
        )

    def _trace_records(self) -> dict[str, dict[str, Any]]:
        if not self.expected:
            return {}
        counts = Counter(self.trainer.witnesses()) + self.seen + self._updated() + self._elsewhere
        counts.update(
            key for keys in self.expected.values() for key in keys if key.startswith("slot:")
        )
        records = {}
        for name, keys in self.expected.items():
            there = [key for key in keys if counts[key] > 0]
            record: dict[str, Any] = {
                "shown": bool(there),
                "what": _listed([f"{key} x{counts[key]}" for key in there]),
            }
            if missing := [key for key in keys if counts[key] <= 0]:
                record["missing"] = _listed(missing)
            records[name] = record
        return records

    def _updated(self) -> Counter[str]:
        """Count the ``parameter:`` keys whose parameters a gradient reached.

        Optimizer state of the parameter's own shape proves it (a moment, a momentum). A change of the weights
        alone could be weight decay; it counts only if there is no such state.
        """
        arrays, moments = self._arrays()
        moved = {name: arrays[f"model.{name}"] != first for name, first in self._initial.items()}
        found = moments | {name: [one] for name, one in moved.items() if not moments[name]}
        return Counter(  # compared on the device of the arrays
            f"parameter:{name}" for name, some in found.items() if any((a != 0).any() for a in some)
        )

    def _arrays(self) -> tuple[Mapping[str, Any], dict[str, list[Any]]]:
        """Return the trainer's arrays, and the optimizer state of each expected parameter's own shape."""
        arrays = self.trainer.local_tensors() if self._names else {}
        names = {key.removeprefix("model.") for key in arrays if key.startswith("model.")}
        moments: dict[str, list[Any]] = {name: [] for name in self._names}
        for key, array in arrays.items():
            owner = _owner(key, names)
            if owner in moments and array.shape == arrays[f"model.{owner}"].shape:
                moments[owner].append(array)
        return arrays, moments


def _owner(key: str, names: Set[str]) -> str | None:
    """Find the parameter of an ``optimizer.<stage>.<entry>.<parameter>``: the longest that fits."""
    kind, _, rest = key.partition(".")
    while kind == "optimizer" and rest:
        if rest in names:
            return rest
        rest = rest.partition(".")[2]
    return None


def _listed(keys: Sequence[str]) -> list[str]:
    more = len(keys) - SHOWN
    return [*keys[:SHOWN], f"and {more} more"] if more > 0 else list(keys)
