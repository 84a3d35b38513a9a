r"""Time to loss: seconds of training until the loss of a fixed held-out text is reached.

    python -m benchmarks.time_to_loss --train train.jsonl.xz --val val.jsonl.xz --tokenizer bpe.json \
        --jobs jobs.jsonl --targets 4.9845,3.6702,3.1819

A job is a line of JSON: ``run`` (a name), ``settings`` (as on the command line of minillm), and
optionally ``preset``, ``plugins``, ``seed``, ``every`` (steps between evaluations; 0: only at the end),
``predictions`` (of an evaluation). Each is trained by the loop of ``minillm train``, one after the other
in this process; runs with equal compiled steps share it.

The clock covers training steps and waiting for data. Compilation and warm-up, undone afterwards, and
evaluation are excluded. Evaluation rows have --window tokens, documents in the order of the file.

Several processes may share a GPU: with the same --turn FILE they compile at once, and train one at a time.
"""

from __future__ import annotations

import fcntl
import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command import add_text, measuring, written
from benchmarks.curves import crossings
from benchmarks.ours import activated
from minillm_core.backends.base import Trainer
from minillm_core.data import (
    Corpus,
    Loader,
    OnBatch,
    ValidationBatches,
    bytes_per_token,
    open_corpus,
)
from minillm_core.data.corpus import open_documents
from minillm_core.data.tokenizer import bytes_by_id
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.streams import Streams
from minillm_core.train.budget import Budget, Cadence
from minillm_core.train.events import Evaluated, Event, Stepped
from minillm_core.train.hooks import plan_hook
from minillm_core.train.loop import Loop, Meter
from minillm_core.train.validation import Validation
from minillm_lab.study import graph_of, without_gc

__all__ = ["Bench", "main"]


class Bench:
    """A trainer of jobs, one after the other, on the same text.

    Args:
        settings: ``key=value`` of every job, such as the data.
        val: the held-out file.
        window: tokens of an evaluation row.
        predictions: per evaluation, if a job does not set it.
        cache: the token cache.
        backend: as for ``minillm train``.
        turn: a file that is locked while a job trains; None: no other process trains here.
    """

    def __init__(
        self,
        settings: tuple[str, ...],
        val: str,
        *,
        window: int,
        predictions: int,
        cache: Path,
        backend: str = "auto",
        turn: Path | None = None,
    ) -> None:
        self.turn = turn
        self.settings, self.val, self.window = settings, val, window
        self.predictions, self.cache, self.backend = predictions, cache, backend
        self.corpus: Corpus | None = None
        self.compiled: tuple[str, Trainer] | None = None

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Train one job; return its curve, without crossings."""
        plan, backend, plugins = activated(
            (*self.settings, *job.get("settings", ())),
            job.get("plugins", ""),
            self.backend,
            preset=job.get("preset", "gpt2-124m"),
        )
        config, seed = plan.config, int(job.get("seed", 0))
        corpus = self.corpus = self.corpus or open_corpus(
            config.data, config.model.vocab, config.train.seq_len, cache=self.cache, say=print
        )
        began = time.perf_counter()
        trainer = self.trainer(plan, backend, seed, corpus, plugins)
        compiled = time.perf_counter() - began
        validation = self.validation(
            trainer, plan, plugins, int(job.get("predictions", self.predictions))
        )
        seconds, losses, curve, speed = [0.0], [], [], []

        def emit(event: Event) -> None:
            if isinstance(event, Stepped):
                seconds[0] += event.step_seconds
                losses.append(event.loss)
                speed.append(event.step_seconds)
            elif isinstance(event, Evaluated):
                curve.append(
                    {
                        "step": event.step,
                        "tokens": event.step * plan.tokens_per_step,
                        "seconds": round(seconds[0], 3),
                        "val_loss": round(event.val_loss, 5),
                        "bits_per_byte": event.bits_per_byte and round(event.bits_per_byte, 5),
                    }
                )
                print(job["run"], curve[-1], flush=True)

        with loader(plan, corpus, plugins) as batches, own_turn(self.turn), without_gc():
            Loop(
                trainer,
                batches,
                plan.values,
                Budget(config.train.steps),
                emit,
                cadence=Cadence(int(job.get("every", 0))),
                evaluate=validation,
                meter=Meter(),
            ).run()
        middle = sorted(speed)[len(speed) // 2]
        return {
            **job,
            "plan_hash": plan.hash,
            "plugins_active": [one.name for one in plan.plugins],
            "parameters": plan.num_parameters,
            "compile_seconds": round(compiled, 1),
            "seconds": round(seconds[0], 3),
            "tokens": curve[-1]["tokens"],
            "tokens_per_second": round(plan.tokens_per_step / middle),
            "peak_gib": round((trainer.peak_bytes() or 0) / 2**30, 2),
            "val_loss": curve[-1]["val_loss"],
            "curve": curve,
            "losses": [round(loss, 4) for loss in losses[:: max(1, len(losses) // 50)]],
        }

    def trainer(
        self, plan: Plan, backend: Any, seed: int, corpus: Corpus, plugins: Sequence[LoadedPlugin]
    ) -> Trainer:
        """Build a trainer with its initial values, compiled and warmed up."""
        graph = graph_of(plan)
        if self.compiled is None or self.compiled[0] != graph:
            self.compiled = None
            gc.collect()
            length = max(self.window, plan.config.train.seq_len)
            trainer = backend.trainer(plan, seed, max_positions=length)
            with loader(plan, corpus, plugins) as batches:
                for _ in range(3):
                    batch = next(batches)
                    trainer.read(trainer.step(batch.micro, plan.values(1e-6), batch.supervised))
            self.validation(trainer, plan, plugins, 4 * self.window)(0)
            self.compiled = graph, trainer
        trainer = self.compiled[1]
        trainer.restart(seed)
        return trainer

    def validation(
        self, trainer: Trainer, plan: Plan, plugins: Sequence[LoadedPlugin], predictions: int
    ) -> Validation:
        """Return the held-out text, in the order of its file."""
        assert self.corpus is not None
        tokenizer, vocab = self.corpus.tokenizer, plan.config.model.vocab
        documents = open_documents(
            [self.val], tokenizer=tokenizer, vocab=vocab, cache=self.cache, say=print
        )
        batches = ValidationBatches(
            documents,
            rows=32,
            seq_len=self.window,
            tokens=predictions,
            seed=None,
            on_batch=hook_of(plan, plugins, self.corpus),
        )
        return Validation(
            trainer, {"": batches}, bytes_per_token(tokenizer, vocab) if tokenizer else None
        )


@contextmanager
def own_turn(file: Path | None) -> Iterator[None]:
    """Hold an exclusive lock of a file, waiting for processes that hold it; None: do nothing."""
    if file is None:
        yield
        return
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def hook_of(plan: Plan, plugins: Sequence[LoadedPlugin], corpus: Corpus) -> OnBatch | None:
    """Return the plugins' ``on_batch``."""
    tokenizer, vocab = corpus.tokenizer, plan.config.model.vocab
    pieces = bytes_by_id(tokenizer, vocab) if tokenizer and plan.on_batch else ()
    return plan_hook(plan, plugins, streams=Streams(0), pieces=pieces)


def loader(plan: Plan, corpus: Corpus, plugins: Sequence[LoadedPlugin]) -> Loader:
    """Open the training text from its start."""
    train = plan.config.train
    return Loader(
        corpus.train,
        rows=train.rows,
        accumulate=train.accumulate,
        seq_len=train.seq_len,
        seed=plan.config.data.seed,
        by=plan.arrangement,
        on_batch=hook_of(plan, plugins, corpus),
    )


def jobs_of(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            yield json.loads(line)


def main() -> None:
    parser = measuring(__doc__, "time_to_loss")
    add_text(parser)
    parser.add_argument("--jobs", type=Path, required=True, help="one JSON object a line")
    parser.add_argument("--targets", default="4.9845,4.0,3.6702,3.1819")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--predictions", type=int, default=1_048_576)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60, help="start no job after this long")
    parser.add_argument("--turn", type=Path, help="a file shared by processes on one GPU")
    arguments = parser.parse_args()
    bench = Bench(
        (
            f"data.paths={json.dumps([arguments.train])}",
            f"data.val={arguments.val}",
            f"data.tokenizer={arguments.tokenizer}",
        ),
        arguments.val,
        window=arguments.window,
        predictions=arguments.predictions,
        cache=arguments.cache,
        backend=arguments.backend,
        turn=arguments.turn,
    )
    targets = [float(one) for one in arguments.targets.split(",")]
    began, found = time.perf_counter(), []
    for job in jobs_of(arguments.jobs):
        if time.perf_counter() - began > 60 * arguments.minutes:
            print("out of time: not run:", job["run"])
            continue
        try:
            result = bench.run(job)
        except Exception as error:  # one failing job must not lose the others
            result = {**job, "error": f"{type(error).__name__}: {error}"[:2000]}
            bench.compiled = None
            print(job["run"], result["error"], flush=True)
        else:
            result["crossings"] = crossings(result["curve"], targets)
            short = {k: result[k] for k in ("val_loss", "seconds", "tokens_per_second", "peak_gib")}
            print("SUMMARY", result["run"], short, result["crossings"], flush=True)
        found.append(result)
        written(arguments, {"targets": targets, "jobs": found})


if __name__ == "__main__":
    main()
