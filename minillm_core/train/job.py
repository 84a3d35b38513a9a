"""A run, checked and bound to this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Trainer
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.config.load import Loaded
from minillm_core.config.schema import Config
from minillm_core.data import Corpus, OnBatch, open_corpus
from minillm_core.data.tokenizer import bytes_by_id
from minillm_core.errors import PlanError
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.sourcing import PLAIN, Sourcing
from minillm_core.train.budget import Position
from minillm_core.train.hooks import ObserverErrors, plan_hook
from minillm_core.train.initial import Branch, Initial
from minillm_core.train.progress import Display


@dataclass
class Job:
    """A plan with its data and its trainer, and the messages collected while binding it."""

    plan: Plan  # of loaded settings: see :func:`with_settings`
    corpus: Corpus
    trainer: Trainer
    notes: Sequence[str] = ()  # shown once the run starts
    details: Sequence[str] = ()  # ... under --verbose alone
    warnings: Sequence[str] = ()  # ... and those to act on
    initial: Initial | None = None  # the weights at step 0
    branch: Branch | None = None  # the checkpoint that the run begins with
    # that of the checkpoint, also of a resumed run
    begins: Position = field(default_factory=Position)
    branched: tuple[str, ...] = ()  # lines on the state that is restored or newly initialised
    seen: Counter[str] = field(default_factory=Counter)  # batches and events seen by plugins
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    raised: dict[str, ObserverErrors] = field(default_factory=dict)  # errors of plugins' observers
    ranks: Ranks = ALONE  # the processes that train together

    @property
    def config(self) -> Config:
        """The run's settings."""
        return self.plan.config

    @property
    def loaded(self) -> Loaded:
        """The run's settings, with their origins."""
        assert self.plan.settings is not None
        return self.plan.settings

    def hook(self, **more: Any) -> OnBatch | None:
        """Compose the plugins' ``on_batch``: see :func:`~minillm_core.train.hooks.plan_hook`."""
        more |= {"seen": self.seen, "specials": self.corpus.specials, "pieces": self.pieces}
        return plan_hook(self.plan, **more)

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of each id, for ``on_batch``; empty if no plugin has the hook."""
        tokenizer, vocab = self.corpus.tokenizer, self.config.model.vocab
        return bytes_by_id(tokenizer, vocab) if tokenizer and self.plan.on_batch else ()

    @property
    def plugins(self) -> tuple[LoadedPlugin, ...]:
        """The active plugins."""
        return self.plan.active


def with_settings(plan: Plan) -> Plan:
    """Return the plan of a ``Run(plan)`` with loaded settings whose values are those of its config.

    Raises:
        PlanError: the plan was not built from loaded settings.
    """
    if plan.settings is None:
        what = "the plan does not hold the settings that it was made from"
        fix = "minillm_core.build_plan(minillm_core.load(...))"
        raise PlanError(what, where="Run(plan)", fix=fix)
    return replace(plan, settings=replace(plan.settings, config=plan.config))


def read_corpus(
    config: Config,
    cache: Path,
    shown: Display,
    *,
    say: Callable[[str], None],
    detail: Callable[[str], None] | None = None,
    asked: Sourcing = PLAIN,
) -> Corpus:
    """Read the data of a config, with progress shown.

    Args:
        config: sets the data, the vocabulary size and the row length.
        cache: folder of the tokens.
        shown: shows the progress.
        say: prints notes for the user.
        detail: prints notes that need no action; None: ``say``.
        asked: the plan's requirements on the documents (special tokens, fields).

    Raises:
        DataError: anything about the data, their tokenizer or the cache folder.
    """
    with shown.phase("reading the data"):
        return open_corpus(
            config.data,
            config.model.vocab,
            config.train.seq_len,
            cache=cache,
            say=say,
            detail=detail,
            progress=shown.progress,
            asked=asked,
        )
