"""Validation: nats per token of the main target, and bits per byte of the text behind it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import backends
from minillm_core.backends.base import Backend, Batch, Model
from minillm_core.backends.detect import Detected, choose, probe
from minillm_core.checkpoint import Checkpoint, newest_or_refuse
from minillm_core.config.schema import Config
from minillm_core.data import Tokenizer, bytes_per_token, open_documents, validation_batches
from minillm_core.errors import Refusal
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import check_support
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.train.events import Evaluated
from minillm_core.train.hooks import batch_hook
from minillm_core.train.record import RUN, read_record
from minillm_core.train.settings import config_of

__all__ = ["TOKENIZER", "Validation", "evaluate_run", "specs_of"]

TOKENIZER = "tokenizer.json"

Create = Callable[[Detected, Plan], Backend]
"""Binds a config to a backend and device."""


class Validation:
    """Evaluates a model on a fixed list of batches.

    Args:
        model: evaluates.
        batches: the same every time; labels -1 where nothing is predicted.
        token_bytes: int (vocab,), UTF-8 bytes of each id, 0 for specials; None without a tokenizer.
    """

    def __init__(
        self, model: Model, batches: Iterable[Batch], token_bytes: np.ndarray | None
    ) -> None:
        self._model, self._batches, self._token_bytes = model, batches, token_bytes
        self.predictions = 0

    def __call__(self, step: int) -> Evaluated:
        """Evaluate after ``step``; val_loss is NaN where nothing is predicted."""
        total = Counter[str]()
        nats, self.predictions = self._model.evaluate(self._counted(total))
        loss = nats / self.predictions if self.predictions else math.nan
        rate = nats / math.log(2) / total["bytes"] if total["bytes"] else None
        return Evaluated(step, loss, rate)

    def _counted(self, total: Counter[str]) -> Iterator[Batch]:
        """The batches, the bytes of what they predict being added up as they go by."""
        for batch in self._batches:
            if self._token_bytes is not None:
                labels = batch["labels"]
                found = self._token_bytes[labels[labels >= 0]]
                total["bytes"] += int(found.sum(dtype=np.int64))
            yield batch


def evaluate_run(
    out: Path,
    data: str | Sequence[str],
    *,
    seq_len: int | None = None,
    max_tokens: int | None = None,
    backend: str = "auto",
    device: str = "auto",
    plugins: Mapping[str, str] | None = None,
    cache: Path,
    say: Callable[[str], None],
    create: Create | None = None,
) -> dict[str, Any]:
    """What ``minillm eval OUT --data F`` reports.

    Args:
        out: a run's folder.
        data: files or folders of text or ids; all of it is read, in file order.
        seq_len: of the windows; default: the run's.
        max_tokens: how many predictions; default: all.
        backend: as for training; it need not be the run's.
        device: as for training.
        plugins: name -> what to load for it, for plugins that must be named again.
        cache: where tokens are kept.
        say: is told what a person should know.
        create: makes the backend; default: :func:`minillm_core.backends.create`.

    Returns:
        ``val_loss``, ``bits_per_byte`` (None without a tokenizer), ``tokens`` (predictions),
        ``step`` and ``checkpoint``.

    Raises:
        Refusal: OUT holds no run or no checkpoint, or anything given cannot be used.
        NoCheckpoint: none verifies.
    """
    data = [data] if isinstance(data, str) else list(data)
    record = read_record(out)
    config = config_of(record["config"], where=str(out / RUN))
    detected = choose(probe(), backend, device)
    here = {"backend": detected.backend, "device": detected.device}
    config = config.model_copy(update=here)
    active = load_plugins(specs_of(record, config, out, plugins or {}), config.plugins)
    check_support(active, detected.backend, detected.device)
    plan = build_plan(config, active)
    if plan.hash != record["plan_hash"]:
        say("warning: the installed versions make another plan of this run than it was trained by")
    checkpoint = newest_or_refuse(out, say)
    tokenizer = _tokenizer(out, config)
    length = seq_len or config.train.seq_len
    documents = open_documents(
        data, tokenizer=tokenizer, vocab=config.model.vocab, cache=cache, say=say
    )
    batches = validation_batches(
        documents,
        rows=config.train.rows,
        seq_len=length,
        tokens=max_tokens,
        seed=None,
        on_batch=batch_hook(plan.on_batch, active, Counter(), config.model.vocab),
    )
    if not len(batches):
        raise Refusal("there is nothing to predict", where=", ".join(data), fix="give more text")
    model = (create or backends.create)(detected, plan).model(
        plan, config.seed, max_positions=length
    )
    _load(model, checkpoint)
    token_bytes = bytes_per_token(tokenizer, config.model.vocab) if tokenizer else None
    validation = Validation(model, batches, token_bytes)
    result = validation(checkpoint.step)
    return {
        "val_loss": result.val_loss,
        "bits_per_byte": result.bits_per_byte,
        "tokens": validation.predictions,
        "step": checkpoint.step,
        "checkpoint": str(checkpoint.path),
    }


def specs_of(
    record: Mapping[str, Any], config: Config, out: Path, named: Mapping[str, str]
) -> dict[str, str]:
    """What to load for a run: its installed plugins by name, and what is named again.

    Code is run by these names, so a folder of somebody else's must not choose it.

    Raises:
        Refusal: a single-file plugin, or one of an OUT that another account owns, is not named; or
            one is named that the run does not have.
    """
    for name in named:
        if name not in config.plugins:
            raise Refusal(
                f"the run was not trained with a plugin '{name}'",
                where=str(out / RUN),
                fix=f"its plugins are: {', '.join(config.plugins) or 'none'}",
            )
    files = {
        entry.get("name"): entry.get("source")
        for entry in record.get("plugins", ())
        if isinstance(entry, Mapping) and entry.get("distribution") is None
    }
    foreign = hasattr(os, "getuid") and (out / RUN).stat().st_uid != os.getuid()
    for name in config.plugins:
        if name not in named and (foreign or name in files):
            why = "another account owns its folder" if foreign else "it is a single file"
            raise Refusal(
                f"the run's plugin '{name}' must be named again: {why}",
                where=str(out / RUN),
                fix=f"--plugins {name if foreign else files[name]}",
            )
    return {name: named.get(name, name) for name in config.plugins}


def _tokenizer(out: Path, config: Config) -> Tokenizer | None:
    path = out / TOKENIZER
    return Tokenizer.load(path, config.model.vocab) if path.exists() else None


def _load(model: Model, checkpoint: Checkpoint) -> None:
    try:
        model.load(checkpoint.arrays("model.") | checkpoint.arrays("state."))
    except (KeyError, ValueError) as error:
        raise Refusal(
            f"the checkpoint does not fit the model: {error}",
            where=str(checkpoint.path),
            fix="install the versions of the plugins that run.json names",
        ) from error
