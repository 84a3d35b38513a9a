"""A run, checked: everything that can be refused is refused here, before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm_core import backends
from minillm_core.backends.base import Backend, Trainer
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint.directory import export_checked
from minillm_core.config.load import Loaded
from minillm_core.config.schema import Config
from minillm_core.data import Corpus, open_corpus
from minillm_core.errors import OutOfMemory
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.blame import at_work, blaming
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.plugins.watch import running
from minillm_core.train.advice import out_of_memory
from minillm_core.train.budget import Budget
from minillm_core.train.initial import Initial
from minillm_core.train.observers import Raised
from minillm_core.train.record import choose_out
from minillm_core.train.resume import Earlier, another_device, check_data, check_plan

__all__ = ["Job", "check"]


@dataclass
class Job:
    """What a run needs, bound to this machine."""

    loaded: Loaded
    plugins: tuple[LoadedPlugin, ...]
    plan: Plan
    corpus: Corpus
    trainer: Trainer
    budget: Budget
    notes: tuple[str, ...]  # what was learnt on the way, to be said once the run starts
    initial: Initial | None = None  # the weights that it starts from at step 0
    warnings: tuple[str, ...] = ()  # ... and that somebody should see before it does
    seen: Counter[str] = field(default_factory=Counter)  # batches and events that plugins took
    raised: dict[str, Raised] = field(default_factory=dict)  # by observers of plugins

    @property
    def config(self) -> Config:
        """What the run was told."""
        return self.loaded.config


def check(
    loaded: Loaded,
    plugins: Sequence[LoadedPlugin],
    detected: Detected,
    *,
    out: Path | None,
    runs: Path,
    cache: Path,
    earlier: Earlier | None = None,
    resume: bool = False,
    create: Callable[[Detected, Plan], Backend] | None = None,
) -> Job:
    """Check OUT, plugins, plan, data and device, cheapest first; prints and writes nothing.

    Args:
        loaded: the config.
        plugins: the active ones.
        detected: where it runs.
        out: the run's folder.
        runs: where folders without a name are made.
        cache: where tokens are kept.
        earlier: the run that is to go on.
        resume: ``out`` may hold a run.
        create: makes the backend.

    Raises:
        Refusal: any of them.
        PluginCodeError: a plugin's own code raised while planning.
        OutOfMemory: not even the model fits.
    """
    config = loaded.config
    choose_out(config.preset, out, runs=runs, resume=resume)
    budget = Budget(config.train.steps, config.train.minutes)
    plugins = tuple(plugins)
    check_support(plugins, detected.backend, detected.device)
    plan = export_checked(build_plan(config, plugins))
    warnings, known = check_plan(earlier, plan, plugins) if earlier else ([], [])
    notes = [*loaded.notes, *known]
    whose, when = at_work(plugins), "while kernels are chosen"
    with blaming(plugins, when), running(lambda: whose(when)):
        backend = (create or backends.create)(detected, plan)
    corpus = open_corpus(
        config.data, config.model.vocab, config.train.seq_len, cache=cache, say=notes.append
    )
    if earlier:
        check_data(earlier, corpus)
    initial = None
    if config.init is not None and (earlier is None or earlier.newest is None):
        initial = Initial.of(config.init, plan)
    try:
        when = "in the model's initial values"
        with blaming(plugins, when), running(lambda: whose(when)):
            trainer = backend.trainer(plan, config.seed)
    except (OutOfMemory, MemoryError) as error:
        raise out_of_memory(error, config.train, None, 0) from error
    if earlier:
        notes.extend(another_device(earlier, trainer.binding))
    return Job(
        loaded, plugins, plan, corpus, trainer, budget, tuple(notes), initial, tuple(warnings)
    )
