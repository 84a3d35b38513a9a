"""One plugin set of benchmarks.cards, in its own process: compiled, and trained in turns.

    python -m benchmarks.card_job SHARE NAME    # as benchmarks/card_child.py starts it

It sends "ready" to its parent when a run could begin, and waits for a line before it does; "over" after
the run; "done" after its last run. The reference's process then waits for another line,
and trains for the time of the others. It exits when the parent has exited.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.card_table import REFERENCE, Judged, active
from minillm_core.errors import Interrupted
from minillm_core.train.request import Prepared, RunRequest, prepare
from minillm_core.train.signals import stop_on_signals
from minillm_lab.ablate import Ready, Request, prepare_ablation
from minillm_lab.ablation import Ablation
from minillm_lab.variants import side_by_side

__all__ = ["DONE", "OVER", "READY", "Share", "main"]

READY, OVER, DONE = "ready", "over", "done"


@dataclass(frozen=True)
class Share:
    """The techniques measured on one device."""

    folder: str
    judged: tuple[Judged, ...]
    preset: str
    settings: tuple[str, ...]
    steps: int
    seeds: int
    device: str
    cache: str
    commit: str | None
    validations: int = 2

    def data(self) -> dict[str, Any]:
        """Return as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Share:
        """Invert :meth:`data`."""
        judged = tuple(
            Judged(**{**one, "beside": tuple(one["beside"]), "options": tuple(one["options"])})
            for one in data["judged"]
        )
        return cls(**{**data, "judged": judged, "settings": tuple(data["settings"])})

    def prepared(self) -> Prepared:
        """Return settings, device and plugins."""
        options = [option for one in self.judged for option in one.options]
        return prepare(
            RunRequest(
                plugins=",".join(active(self.judged)),
                preset=self.preset,
                assignments=(*self.settings, *options),
                flags={"--steps": self.steps, "--device": self.device},
            ),
            to_run=True,
        )

    def ready(self, turn: Callable[[], AbstractContextManager[None]] = nullcontext) -> Ready:
        """Prepare the ablation of this share."""
        prepared = self.prepared()
        beside = {one.plugin: one.beside for one in self.judged}
        request = Request(
            tuple(beside),
            prepared,
            runs=Path(self.folder).parent,
            cache=Path(self.cache),
            say=_say,
            out=Path(self.folder),
            seeds=self.seeds,
            evaluations=self.validations,
            processes=1,  # the shares themselves are processes that take turns
        )
        return prepare_ablation(
            request,
            turn=turn,
            at=self.commit,
            design=side_by_side(prepared.loaded, prepared.plugins, beside, REFERENCE),
        )


class Turn:
    """The turn to use the device for a run: while one process trains, another draws initial values."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for the turn, and return it at the end.

        Raises:
            Interrupted: the parent has exited.
        """
        self.ask(READY)
        yield
        with suppress(BrokenPipeError):  # the run is kept anyway
            print(OVER, flush=True)

    def ask(self, word: str) -> None:
        """Send a word and wait for an answer.

        Raises:
            Interrupted: the parent has exited.
        """
        torch.cuda.empty_cache()  # processes that share the device need the memory
        print(word, flush=True)
        if not sys.stdin.readline():
            raise Interrupted("the process that gives the turns has exited")


def main(share: Share, name: str) -> None:
    """Run all runs of one variant."""
    turn = Turn()
    with stop_on_signals(patient=True) as stop:
        ablation: Ablation = share.ready(turn).open(stop)
        (variant,) = (one for one in ablation.design.variants if one.name == name)
        ablation.make(variant)
        if variant is ablation.reference:
            turn.ask(DONE)
            ablation.train_reference()
        print(DONE, flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Share.of(json.loads(sys.argv[1])), sys.argv[2])
