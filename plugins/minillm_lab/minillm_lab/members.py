"""The folder of a study: its metadata, and one file per finished run, written when the run ends.

A study that is killed at any moment loses only the current run.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from minillm_core import Interrupted, MinillmError, NonFinite, OutOfMemory, Plan, Refusal, Stopped
from minillm_core.commands import counted, plain
from minillm_core.studies import (
    ABLATION,
    RUN,
    Binding,
    Loaded,
    LoadedPlugin,
    hardware,
    read_json,
    replace_file,
    versions,
)
from minillm_lab.cards import commit
from minillm_lab.pool import Made, Pool, Wanted
from minillm_lab.search_page import RESULT as SEARCH
from minillm_lab.study import Study, Trained

RUNS = "runs"
"""The folder of run files, inside the study's folder."""

ANEW = "the same command starts again"
"""The fix for a study that was ended by a signal before its first run was finished."""

BOUND = {"compile": "auto", "checkpointing": False, "kernels": "auto"}
"""Settings outside the plan's hash that change a run's speed, with their defaults."""

FINDINGS = (NonFinite, OutOfMemory)
"""Errors that are recorded as a run's outcome and do not end the study."""

HOLDS = {RUN: "a run of minillm train", ABLATION: "an ablation", SEARCH: "a search"}
"""What a folder holds that contains a file of this name."""

Identity = Mapping[str, Any]


class Members:
    """The runs of a study, trained or loaded from their files.

    Args:
        out: the study's folder; locked by the caller.
        study: trains the runs.
        kind: the study in one word for error messages, such as "ablation".
        say: prints a line.
        findings: errors that are stored as the outcome of a run.
        defaults: entries of a run's identity that files of earlier versions lack.
        way_on: the hint that continues an interrupted study; None: the same command with its folder.
        clock: a monotonic clock, in seconds.

    Attributes:
        spent: seconds of all runs so far, including runs loaded from files and the time between runs,
            such as planning.
        wall: seconds of the last run.
    """

    def __init__(
        self,
        out: Path,
        study: Study,
        kind: str,
        say: Callable[[str], None],
        *,
        findings: tuple[type[MinillmError], ...] = FINDINGS,
        defaults: Identity = BOUND,
        way_on: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out, self.study, self._kind, self._findings = out, study, kind, findings
        self._defaults, self._way_on = defaults, way_on or continuing(out)
        self.say = say
        self._warned: set[Path] = set()  # files that a warning has named
        self._clock = clock
        self._since = clock()
        self.spent = self.wall = 0.0

    def start(self) -> None:
        """Start the clock; earlier time counts for no run."""
        self._since = self._clock()

    def take(
        self, file: str, identity: Identity, unlike: Callable[[Identity, Identity], str]
    ) -> Trained | str | None:
        """Load a finished run from its file.

        Args:
            file: its name.
            identity: the plan, and the facts that must be equal for two runs to be comparable.
            unlike: describes the difference of two identities.

        Returns:
            The run, or the reason of its failure; None as :meth:`_read`.

        Raises:
            Refusal: the run belongs to another study, or the file is not as minillm writes it.
        """
        path = self.out / RUNS / file
        if (kept := self._read(path)) is None:
            return None
        with understood(path, "remove this file: its run is trained again"):
            was, wall = {**self._defaults, **kept["identity"]}, float(kept.get("wall_seconds", 0.0))
            outcome = str(kept["failed"]) if "failed" in kept else Trained.of(kept["run"])
            if isinstance(outcome, Trained) and not outcome.curve:
                raise ValueError("its curve is empty")
        if was != identity:
            raise Refusal(
                f"{self.out} holds the runs of another {self._kind}",
                where=f"{path}: {unlike(was, identity)}",
                fix="--out with another folder, or take that one away",
            )
        self._count(wall)
        self.start()
        return outcome

    def make(
        self,
        file: str,
        identity: Identity,
        plan: Plan,
        seed: int,
        *,
        evaluations: int,
        watch: Callable[[float], None],
    ) -> Trained | str:
        """Train a run and write its file.

        Returns:
            The run, or the reason of its failure.

        Raises:
            Interrupted: a signal; nothing was written.
        """
        outcome: Trained | str
        try:
            outcome = self.study.train(plan, seed, evaluations=evaluations, watch=watch)
        except (Interrupted, Stopped):
            raise
        except self._findings as error:
            outcome = error.what
        self._count(self.keep(file, identity, outcome))
        return outcome

    def ahead(
        self,
        pool: Pool,
        wanted: Iterable[Wanted],
        watch: Callable[[Sequence[Wanted], float], None],
    ) -> Iterator[tuple[Made, float]]:
        """Train the runs that have no file yet on all devices at once, and write their files.

        Yields:
            Each run as it ends, and the seconds that its file counts as its own.

        Raises:
            Interrupted: a signal; the runs under way are lost.
            MinillmError: an error of a run that is not an outcome of it, or a process ended.
        """
        missing = {
            one.file: one for one in wanted if self._read(self.out / RUNS / one.file) is None
        }
        for made in pool.train([*missing.values()], watch=watch):
            outcome = made.outcome
            if isinstance(outcome, MinillmError):
                if not isinstance(outcome, self._findings):
                    raise outcome
                outcome = outcome.what
            yield made, self.keep(made.wanted.file, made.wanted.identity, outcome)

    def keep(self, file: str, identity: Identity, outcome: Trained | str) -> float:
        """Write the file of a run that ended now: its figures or the reason of its failure.

        Returns:
            The seconds since the run before it ended, which the file counts as this one's.
        """
        wall = self._clock() - self._since
        self.start()
        kept = {"failed": outcome} if isinstance(outcome, str) else {"run": outcome.data()}
        self.write(f"{RUNS}/{file}", {"identity": identity, **kept, "wall_seconds": wall})
        return wall

    def write(self, file: str, document: Mapping[str, Any]) -> None:
        """Write a JSON document atomically into the study's folder; raises as :meth:`write_text`."""
        text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
        self.write_text(file, text + "\n")

    def write_text(self, file: str, text: str) -> None:
        """Write a file atomically into the study's folder, which is created.

        Raises:
            MinillmError: it cannot be written, such as on a full disk.
        """
        path = self.out / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        except OSError as error:
            why = error.strerror or str(error)
            raise MinillmError(
                f"{path.name} could not be written: {why}",
                where=str(path),
                fix=f"make room, or make the folder writable; {self._way_on}",
            ) from None

    def write_page(self, file: str, text: str) -> None:
        """Write a page of the study; one warning if it cannot be written, and the study continues."""
        try:
            self.write_text(file, text)
        except MinillmError as error:
            path = self.out / file
            self._warn(path, f"warning: {error.what}; the runs continue without it ({path})")

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Read the file of a run; None if it does not exist, or after a warning if it is cut short."""
        if (kept := read(path)) is None and path.exists():
            self._warn(path, f"warning: {path} cannot be read: its run is trained again")
        return kept

    def _warn(self, path: Path, line: str) -> None:
        """Print a warning about a file, once."""
        if path not in self._warned:
            self._warned.add(path)
            self.say(line)

    def _count(self, wall: float) -> None:
        self.wall = wall
        self.spent += wall


def continuing(out: Path, *options: str) -> str:
    """Return the hint that continues an interrupted study: its command with its folder, and more options."""
    return f"the same command with {' '.join([*options, '--out', shlex.quote(str(out))])} continues"


def choose_folder(runs: Path, kind: str) -> Path:
    """Choose the folder runs/KIND-N with the first free N."""
    n = 1
    while (runs / f"{kind}-{n}").exists():
        n += 1
    return runs / f"{kind}-{n}"


def refuse_other(out: Path, own: str) -> None:
    """Check that a study's folder holds neither a training run nor a study of another kind.

    Args:
        out: the folder.
        own: the file with the study's own result.

    Raises:
        Refusal: it does.
    """
    for file, what in HOLDS.items():
        if file != own and (out / file).exists():
            raise Refusal(
                f"{out} holds {what}", where=str(out / file), fix="--out with another folder"
            )


def facts_of(
    loaded: Loaded, corpus: Any, binding: Binding, plugins: Iterable[LoadedPlugin]
) -> dict[str, Any]:
    """Return a study's metadata as JSON: corpus, model and machine, versions, date and commit.

    Args:
        loaded: the settings of the baseline run.
        corpus: its text, from ``open_corpus``.
        binding: of its plan to this machine.
        plugins: plugins whose distribution versions are recorded.
    """
    distributions = sorted({one.distribution for one in plugins if one.distribution})
    config, branch = loaded.config, loaded.branch
    weights = f"{branch.out}@{branch.checkpoint.step}" if branch else config.init
    return {
        "data": {"fingerprint": corpus.fingerprint, "description": corpus.description},
        "model": config.model.model_dump(mode="json"),
        "preset": config.preset,
        **({"begins_with": weights} if weights else {}),  # the weights of a run or a model
        "backend": binding.backend,
        "device": binding.device_name,
        "dtype": binding.dtype,
        "hardware": hardware(binding.device_name),
        "versions": versions(binding.backend, distributions),
        "distributions": distributions,  # of the plugins
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def stopped(out: Path, kept: int, way_on: str, *, anew: str = ANEW) -> MinillmError:
    """Return the error for a study ended by a signal: what is kept, and how to resume.

    Args:
        out: the study's folder.
        kept: number of its finished runs.
        way_on: the fix where runs are kept.
        anew: the fix if none is.
    """
    if not kept:
        return Interrupted("ended by a signal; no run was finished", where=str(out), fix=anew)
    return Stopped(
        f"ended by a signal; {counted(kept, 'finished run')} kept",
        where=str(out / RUNS),
        fix=way_on,
    )


def identity_of(plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity: its plan, and the facts that must be equal for runs to be comparable.

    Versions of plugins are part of the plan, and those of other plugins of the study do not matter.
    """
    shared: dict[str, Any] = {key: about[key] for key in ("data", "device", "dtype")}
    if "begins_with" in about:
        shared["begins_with"] = about["begins_with"]
    others = about.get("distributions", ())
    shared["versions"] = {k: v for k, v in about["versions"].items() if k not in others}
    bound = plan.config.train.model_dump(include={"compile", "checkpointing"})
    measured = {"kernels": plan.config.kernels, "eval_tokens": plan.config.eval.tokens}
    return {"plan_hash": plan.hash, **shared, **bound, **measured}


def read(path: Path) -> dict[str, Any] | None:
    """Read a JSON document of a study; return None if it is missing or truncated."""
    try:
        return read_json(path)
    except Refusal:
        return None


@contextmanager
def understood(path: Path, fix: str) -> Iterator[None]:
    """Refuse a file of a study whose content is not as minillm writes it.

    Args:
        path: the file that is interpreted within the context.
        fix: what the user can do about it.

    Raises:
        Refusal: interpreting the file raised.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {plain(str(error), 120)}"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {plain(first['msg'])}"
        what = f"{path.name} is not as minillm writes it"
        raise Refusal(what, where=f"{path}: {why}", fix=fix) from error
