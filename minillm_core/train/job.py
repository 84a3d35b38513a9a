"""A run, checked and bound to this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from minillm_core.backends.base import Trainer
from minillm_core.config.load import Loaded
from minillm_core.config.schema import Config
from minillm_core.data import Corpus, OnBatch, open_corpus
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.streams import Streams
from minillm_core.train.budget import Budget, Position
from minillm_core.train.hooks import Raised, plan_hook
from minillm_core.train.initial import Branch, Initial
from minillm_core.train.progress import Display


@dataclass
class Job:
    """A plan with its data and its trainer, and the messages that came up on the way."""

    loaded: Loaded
    plugins: tuple[LoadedPlugin, ...]
    plan: Plan
    corpus: Corpus
    trainer: Trainer
    budget: Budget
    notes: tuple[str, ...]  # shown once the run starts
    details: tuple[str, ...] = ()  # ... under --verbose alone
    warnings: tuple[str, ...] = ()  # ... and those to act on
    initial: Initial | None = None  # the weights that it starts from at step 0
    branch: Branch | None = None  # the checkpoint that it starts from
    begins: Position = field(default_factory=Position)  # where that was
    branched: tuple[str, ...] = ()  # lines: what it takes from there, and what starts anew
    seen: Counter[str] = field(default_factory=Counter)  # batches and events that plugins took
    cache: Path | None = None  # where the speeds of runs are kept; None: nowhere
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    raised: dict[str, Raised] = field(default_factory=dict)  # by observers of plugins

    @property
    def config(self) -> Config:
        """The run's settings."""
        return self.loaded.config

    def inference_hook(self, seen: Counter[str] | None = None) -> OnBatch | None:
        """Join the plugins' ``on_batch`` for other phases than train; streams begin anew every batch.

        Args:
            seen: takes the counts of :func:`minillm_core.train.hooks.batch_hook`; default: the job's.
        """
        streams = Streams(self.config.seed)
        return plan_hook(self.plan, self.plugins, self.seen if seen is None else seen, streams)


def read_corpus(
    config: Config,
    cache: Path,
    shown: Display,
    *,
    say: Callable[[str], None],
    detail: Callable[[str], None] | None = None,
) -> Corpus:
    """Read the data that a config names, in view.

    Args:
        config: names the data, the vocabulary's size and the rows' length.
        cache: where tokens are kept.
        shown: shows how far it is.
        say: prints what a person should know of them.
        detail: prints what asks nothing of a person; None: ``say``.

    Raises:
        DataError: anything about the data, their tokenizer or the cache folder.
    """
    length = config.train.seq_len
    with shown.phase("reading the data"):
        return open_corpus(
            config.data,
            config.model.vocab,
            length,
            cache=cache,
            say=say,
            detail=detail,
            progress=shown.progress,
        )
