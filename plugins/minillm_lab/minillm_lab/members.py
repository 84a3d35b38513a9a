"""The folder of a study: its facts, and its finished runs, each a file of its own that is written when the run is over.

So a study that was killed at any moment loses the run it was in, and no other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minillm_core import Interrupted, MinillmError, NonFinite, OutOfMemory, Plan, Refusal, Stopped
from minillm_core.commands import counted
from minillm_core.inspection import Config
from minillm_core.studies import (
    RUN,
    Binding,
    LoadedPlugin,
    hardware,
    read_json,
    replace_file,
    versions,
)
from minillm_lab.cards import commit
from minillm_lab.study import Study, Trained

RUNS = "runs"
"""The folder of the files, within that of the study."""

BOUND = {"compile": "auto", "checkpointing": False, "kernels": "auto"}
"""Settings that are in no plan's hash and change a run's speed: those of a run that names none."""

FINDINGS = (NonFinite, OutOfMemory)
"""Errors of a run that are findings about its plan, and end no study."""

Identity = Mapping[str, Any]


class Members:
    """Makes the runs of a study, or takes them from their files.

    Args:
        out: the study's folder; locked by the caller.
        study: trains.
        kind: the study in a word, for the error about the files of another: "ablation".
        findings: errors that are kept as the outcome of a run.
        clock: seconds that never go back.

    Attributes:
        spent: seconds that the members so far took, those that were taken from files included;
            with what lay between them, such as planning.
        wall: seconds that the last one took.
    """

    def __init__(
        self,
        out: Path,
        study: Study,
        kind: str,
        *,
        findings: tuple[type[MinillmError], ...] = FINDINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out, self.study, self._kind, self._findings = out, study, kind, findings
        self._clock = clock
        self._since = clock()
        self.spent = self.wall = 0.0

    def start(self) -> None:
        """Begin to count: what came before is no member's."""
        self._since = self._clock()

    def take(
        self, file: str, identity: Identity, unlike: Callable[[Identity, Identity], str]
    ) -> Trained | str | None:
        """Take a finished run from its file.

        Args:
            file: its name.
            identity: what two runs must share to be compared, and the plan.
            unlike: describes the difference of two identities.

        Returns:
            The run, or why it failed; None: there is none.

        Raises:
            Refusal: it is of another study.
        """
        path = self.out / RUNS / file
        if (kept := read(path)) is None:
            return None
        if (was := {**BOUND, **kept["identity"]}) != identity:
            raise Refusal(
                f"{self.out} holds the runs of another {self._kind}",
                where=f"{path}: {unlike(was, identity)}",
                fix="--out with another folder, or take that one away",
            )
        self._count(kept.get("wall_seconds", 0.0))
        return kept.get("failed") or Trained.of(kept["run"])

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
        """Make a run and write its file.

        Returns:
            The run, or why it failed.

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
        kept = {"failed": outcome} if isinstance(outcome, str) else {"run": outcome.data()}
        self._count(self._clock() - self._since)
        write(self.out / RUNS / file, {"identity": identity, **kept, "wall_seconds": self.wall})
        return outcome

    def _count(self, wall: float) -> None:
        self.wall, self._since = wall, self._clock()
        self.spent += wall


def choose_folder(runs: Path, kind: str) -> Path:
    """Choose runs/KIND-N, N being the first that is free."""
    n = 1
    while (runs / f"{kind}-{n}").exists():
        n += 1
    return runs / f"{kind}-{n}"


def refuse_run(out: Path) -> None:
    """Refuse the folder of a run for a study.

    Raises:
        Refusal: it is one.
    """
    if (out / RUN).exists():
        raise Refusal(
            f"{out} holds a run of minillm train",
            where=str(out / RUN),
            fix="--out with another folder",
        )


def facts_of(
    config: Config, corpus: Any, binding: Binding, plugins: Iterable[LoadedPlugin]
) -> dict[str, Any]:
    """Give the facts of a study as JSON: its text, model and machine, versions, date and commit.

    Args:
        config: of the run that others are compared with.
        corpus: its text, as ``open_corpus`` gives it.
        binding: of its plan to this machine.
        plugins: whose distributions' versions are named.
    """
    distributions = [one.distribution for one in plugins if one.distribution]
    return {
        "data": {"fingerprint": corpus.fingerprint, "description": corpus.description},
        "model": config.model.model_dump(mode="json"),
        "preset": config.preset,
        "backend": binding.backend,
        "device": binding.device_name,
        "dtype": binding.dtype,
        "hardware": hardware(binding.device_name),
        "versions": versions(binding.backend, distributions),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def stopped(out: Path, kept: int, way_on: str) -> MinillmError:
    """Make the error of a study that a signal ended: what is kept, and how it is continued."""
    if not kept:
        return Interrupted("ended by a signal; no run was finished")
    return Stopped(
        f"ended by a signal; {counted(kept, 'finished run')} kept",
        where=str(out / RUNS),
        fix=way_on,
    )


def identity_of(plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    """Identify a run: its plan, and the facts that two runs must share to be compared."""
    shared = {key: about[key] for key in ("data", "device", "dtype", "versions")}
    bound = plan.config.train.model_dump(include={"compile", "checkpointing"})
    return {"plan_hash": plan.hash, **shared, **bound, "kernels": plan.config.kernels}


def read(path: Path) -> dict[str, Any] | None:
    """Read a JSON document of a study; None where there is none or it was cut short."""
    try:
        return read_json(path)
    except Refusal:
        return None


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    replace_file(path, text.encode() + b"\n")
