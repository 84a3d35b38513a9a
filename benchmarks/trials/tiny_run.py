"""The run used in trials: a model of two layers on a CPU, a third of a second long."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trials.forked import Child, fork

__all__ = ["TinyRun", "minillm"]

STEPS = 24
EVERY = 4  # steps between checkpoints
KEEP = 2
SETTINGS = (
    # a wider run would mostly compute matrix products, for which MLX's reference BLAS reaches 4 GFLOP/s
    *("model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.hidden=64"),
    *("model.vocab=512", "train.rows=2", "train.seq_len=32", "eval.tokens=128", "eval.every=8"),
    "eval.samples=0",
    *(f"checkpoint.every={EVERY}", f"checkpoint.keep={KEEP}"),
)


def minillm(arguments: Sequence[str]) -> int:
    """Run the program in this process."""
    from minillm_core.cli.main import main

    return main(arguments)


@dataclass(frozen=True)
class TinyRun:
    """A tiny run, to be started.

    Attributes:
        folder: of the text, the cache and the logs.
        backend: torch or mlx.
        plugins: in the form of ``--plugins``.
        settings: ``key=value``, overriding :data:`SETTINGS`.
        device: a GPU's trainers are started, since CUDA does not survive a fork.
    """

    folder: Path
    backend: str = "torch"
    plugins: str = ""
    settings: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def text(self) -> Path:
        """Write sixty documents of random words, the same every time."""
        path = self.folder / "text.jsonl"
        if not path.exists():
            rng = random.Random(0)
            words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(300)]
            rows = ({"text": " ".join(rng.choices(words, k=100))} for _ in range(60))
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def arguments(self, out: Path, *, resume: bool = False, steps: int = STEPS) -> list[str]:
        """Return the arguments of ``minillm``."""
        return [
            *("train", "--preset", "tiny", "--data", str(self.text), "--steps", str(steps)),
            *("--backend", self.backend, "--device", self.device, "--out", str(out)),
            *(("--plugins", self.plugins) if self.plugins else ()),
            *(("--resume",) if resume else ()),
            *SETTINGS,
            *self.settings,
        ]

    def start(
        self,
        out: Path,
        *,
        resume: bool = False,
        bare: bool = False,
        steps: int = STEPS,
        first: Callable[[], None] = lambda: None,
        last: Callable[[], None] = lambda: None,
        log: Path | None = None,
    ) -> Child:
        """Fork a trainer.

        Args:
            out: the run's folder.
            resume: resume the existing run.
            bare: only ``train --resume --out``; run.json has the other settings.
            steps: of the run.
            first: called in the child before anything else.
            last: called in the child at its end; not on a GPU, where the child becomes another program.
            log: file for its output; default: :meth:`log`.
        """
        arguments = self.arguments(out, resume=resume, steps=steps)
        if bare:
            arguments = ["train", "--resume", "--out", str(out)]

        def run() -> int:
            first()
            if self.device != "cpu":
                os.execv(sys.executable, [sys.executable, "-m", "minillm_core", *arguments])
            code = minillm(arguments)
            last()
            return code

        return self.fork(run, log or self.log(out))

    def fork(self, run: Callable[[], int], log: Path) -> Child:
        """Fork any function that uses the token cache of these runs."""

        def within() -> int:
            os.environ["MINILLM_CACHE"] = str(self.folder / "cache")
            return run()

        return fork(within, log)

    def tidy(self, out: Path, *, keep: bool) -> None:
        """Remove a run and its log, or move them to ``failed/`` for inspection."""
        if keep:
            failed = self.folder / "failed"
            failed.mkdir(exist_ok=True)
            for path in (out, self.log(out)):
                if path.exists():
                    path.rename(failed / path.name)
            return
        shutil.rmtree(out, ignore_errors=True)
        self.log(out).unlink(missing_ok=True)

    def log(self, out: Path) -> Path:
        """Return what the trainers on ``out`` printed."""
        return self.folder / f"{out.name}.log"

    def said(self, out: Path) -> str:
        """Return the output, parsed."""
        path = self.log(out)
        return path.read_text(errors="replace") if path.exists() else ""
