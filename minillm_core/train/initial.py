"""The initial state of a new run: a model directory's weights, or another run's checkpoint.

``minillm train --branch RUN[@STEP] --out NEW``: the new run takes the old one's settings, overlaid by
those given, its weights, optimizer state, step and place in the data. If its plan differs, arrays
are matched by name and shape, and the others are newly initialised. ``--init RUN[@STEP]`` takes only
settings and weights, and begins at step 0, at the start of its data and its schedules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.backends.base import Trainer
from minillm_core.checkpoint import directories
from minillm_core.checkpoint.directories import Fitted, ModelDirectory
from minillm_core.checkpoint.read import Checkpoint, chosen_or_refuse
from minillm_core.config.origins import Layer, Setting
from minillm_core.config.schema import Config
from minillm_core.data import Corpus, Tokenizer
from minillm_core.errors import ConfigError, DataError, Refusal
from minillm_core.optim.follow import tied
from minillm_core.optim.views import VIEWED, with_views
from minillm_core.plan import Plan, build_plan
from minillm_core.text import few, quoted
from minillm_core.train.budget import Budget, Position
from minillm_core.train.record import read_record, split_run
from minillm_core.train.request import RunRequest, prepare
from minillm_core.train.restore import SavedModel
from minillm_core.train.run_folder import TOKENIZER, RunFolder


def initial_layer(
    directory: object, say: Callable[[str], None] = lambda line: None
) -> tuple[Layer, str]:
    """Read the shape and the tokenizer of a model directory as settings.

    Args:
        directory: its path; or, if no such path exists, the name of a published model, to be fetched.
        say: prints notes for the user.

    Returns:
        The settings, and the path.

    Raises:
        Refusal: it is not a model directory, or a run cannot start from it.
    """
    if not isinstance(directory, str):  # init=5: settings are validated after this
        raise ConfigError(
            f"init is the path of a model directory, not {directory!r}",
            where=f"init={directory!r}",
            fix=f"init='./{directory}' where the directory is called that, or leave it out",
        )
    layer, place = Layer(), directory
    if not os.path.lexists(directory):
        place = str(directories.fetch_directory(directory, say) or directory)
    for key, value in read_initial(place).settings.items():
        layer.add(key, Setting(value, f"--init {directory}", f"{place}/config.json"))
    return layer, place


def read_initial(directory: str) -> ModelDirectory:
    """Read a model directory.

    Raises:
        Refusal: it is not a model directory, or a run cannot start from it.
    """
    path = Path(directory)
    if (found := directories.read_directory(path)) is not None:
        return found
    if not directories.offers():
        raise directories.absent(f"{path} cannot be read as a model directory")
    raise Refusal(
        f"{path} is not a model directory",
        where=str(path / "config.json") if path.is_dir() else "there is no such folder",
        fix="give a folder with config.json and model.safetensors, as minillm export writes it",
    )


@dataclass(frozen=True)
class Initial:
    """The initial weights of a run."""

    directory: ModelDirectory
    fitted: Fitted

    @classmethod
    def of(cls, directory: str, plan: Plan) -> Initial:
        """Read a directory for a plan.

        Raises:
            Refusal: it is not a model directory, or its weights do not fit the plan.
        """
        found = read_initial(directory)
        return cls(found, found.fit(plan))

    def load(self, trainer: Trainer) -> Iterator[str]:
        """Load the weights into the trainer; yields lines to print."""
        arrays, lines = copy_leaders(trainer.plan, 0.0, self.fitted.arrays)
        trainer.load(trainer.placeholders() | arrays)
        yield f"the weights come from {self.directory.published or self.directory.path}"
        yield from lines
        yield from self.directory.notes
        if own := self.fitted.initial:
            yield f"not in the directory, so newly initialised: {few(own)}"

    def data(self) -> dict[str, Any]:
        """Describe the weights' origin for run.json."""
        found = {"directory": str(self.directory.path), "digest": self.directory.digest}
        name = self.directory.published
        return found if name is None else found | {"published": name}


def copy_leaders(
    plan: Plan, progress: float, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Copy weights and state of leaders to the parameters that still follow them.

    Args:
        plan: its ``follows``.
        progress: where the run begins.
        arrays: as a checkpoint names them.

    Returns:
        The arrays, and lines to print about those that are left out.
    """
    found, lines = dict(arrays), []
    for name, leader in tied(plan.follows, plan.values(progress)).items():
        ours = {key: array for key, array in arrays.items() if key.endswith(f".{leader}")}
        led = {f"{key.removesuffix(leader)}{name}": array for key, array in ours.items()}
        if any(not np.array_equal(arrays.get(key, array), array) for key, array in led.items()):
            share = f"{plan.follows[name].until:.3g} of the run"
            lines.append(
                f"{name} starts as a copy of {leader}, tied to it until {share}; its own value is dropped"
            )
        found |= led
    return found, lines


def open_directory(
    directory: ModelDirectory, request: RunRequest, say: Callable[[str], None]
) -> SavedModel:
    """Plan a directory's model unchanged, with the plugins that it needs, and read its weights.

    Args:
        directory: the directory.
        request: further settings and plugins.
        say: prints notes for the user.

    Raises:
        Refusal: a needed plugin is not installed, or the settings change the model.
    """
    needed = directory.plugins
    named = ",".join((*needed, *filter(None, [request.plugins])))
    options = {f"{one}.{key}": v for one, given in needed.items() for key, v in given.items()}
    seq_len = (
        {} if directory.positions is None else {"train.seq_len": min(directory.positions, 1024)}
    )
    prepared = prepare(
        replace(
            request,
            plugins=named or None,
            preset="tiny",  # none of its settings shapes this model
            flags={**request.flags, "--init": str(directory.path)},
            settings={**options, **seq_len, **(request.settings or {})},
        ),
        to_run=False,
        fit=False,
    )
    config = prepared.loaded.config
    plan = build_plan(prepared.loaded, prepared.plugins)
    for note in directory.notes:
        say(note)
    tokenizer = None
    if config.data.tokenizer is not None:
        path, end_of_text = Path(config.data.tokenizer), config.data.end_of_text
        tokenizer = Tokenizer.load(path, config.model.vocab, end_of_text)
        if directory.begins is not None:
            tokenizer = tokenizer.with_start_token(directory.begins, str(directory.path))
    fitted = directory.fit(plan)

    def arrays() -> dict[str, np.ndarray]:
        return {name: np.asarray(one) for name, one in fitted.arrays.items()}

    return SavedModel(plan, tokenizer, directory.path, 0, arrays)


BRANCHED_FROM = "branched_from"
"""Key in run.json."""

BEST = "best"


@dataclass(frozen=True)
class Branch(RunFolder):
    """The checkpoint that a new run begins with, and the absolute path of its run."""

    checkpoint: Checkpoint
    weights_only: bool  # --init: no optimizer state, step or place in the data

    @classmethod
    def of(cls, given: str, say: Callable[[str], None], *, weights_only: bool) -> Branch:
        """Find the checkpoint of ``--branch`` or ``--init``: ``RUN``, ``RUN@STEP`` or ``RUN@best``.

        Raises:
            Refusal: there is no such run or checkpoint.
            NoCheckpoint: it does not verify.
        """
        folder, which = split_run(given)
        flag = "--init" if weights_only else "--branch"
        if which not in ("", BEST) and not (which.isascii() and which.isdecimal()):
            fix = f"{flag} RUN, {flag} RUN@STEP or {flag} RUN@best"
            raise Refusal(f"'{which}' is not a step of a run", where=f"{flag} {given}", fix=fix)
        out = Path(folder).expanduser().absolute()
        record = read_record(out)
        step = int(which) if which and which != BEST else None
        typed = f"{flag} {quoted(out)}@"
        chosen = chosen_or_refuse(out, say, step=step, best=which == BEST, typed=typed)
        return cls(out, record, chosen, weights_only)

    def data(self) -> dict[str, Any]:
        """Describe the checkpoint for run.json."""
        taken = {"weights_only": True} if self.weights_only else {}
        return {
            "out": str(self.out),
            "step": self.checkpoint.step,
            "plan_hash": self.record["plan_hash"],
            **taken,
        }

    def base_layer(self, *, other_text: bool) -> Layer:
        """Return the old run's settings, as the lowest layer of the new run's.

        Args:
            other_text: the text is another: ids keep their meaning only with the old run's tokenizer.
        """
        layer = self.layer()
        layer.settings.pop("init", None)  # the weights are read from the checkpoint
        own = self.out / TOKENIZER
        if other_text and own.exists():
            flag = "--init" if self.weights_only else "--branch"
            layer.settings["data.tokenizer"] = Setting(str(own), flag, str(own))
        return layer

    def check(self, plan: Plan, budget: Budget | None) -> None:
        """Check that a run can begin with the checkpoint, without reading its arrays.

        Args:
            plan: the new run's.
            budget: the new run's; None: it is chosen once the data are read.

        Raises:
            Refusal: no weight fits, or the checkpoint's step already spends the budget.
        """
        held = self.checkpoint.deferred("model.").items()
        shapes = {f"model.{name}": info.shape for name, info in plan.parameters.items()}
        if not any(shapes.get(name) == array.shape for name, array in held):
            what = "no weight of the checkpoint fits this model"
            fix = "model.* as in the run that the weights are from"
            raise Refusal(what, where=str(self.checkpoint.path), fix=fix)
        at = Position.of(self.checkpoint.scalars)
        if budget and not self.weights_only and budget.spent(at.step, at.elapsed):
            what = f"step {at.step:,} of {self.out} is the end of this run already"
            fix = f"--steps {2 * at.step}, for example: they are counted from step 0"
            raise Refusal(what, where=f"--branch {self.out}", fix=fix)

    def load(
        self, trainer: Trainer, corpus: Corpus, config: Config, budget: Budget
    ) -> tuple[Position, tuple[str, ...]]:
        """Restore a trainer from the checkpoint, as far as the arrays fit.

        Returns:
            The position where the new run begins; and notes for the user.

        Raises:
            Refusal: as :meth:`check`.
            DataError: the tokenizers differ.
        """
        self.check(trainer.plan, budget)
        self._check_tokenizer(corpus, config)
        held = self.checkpoint.deferred()  # raw weights, and the evaluated ones in their place
        if self.weights_only:
            read = with_views(held)
            weights = {n: array for n, array in read.items() if n.startswith(("model.", "state."))}
            seen = [name for name in held if name.startswith(VIEWED)]
            how = (f"{len(seen)} weights are those that it evaluates (opt.view)",) if seen else ()
            return Position(), (*self._take(trainer, weights, budget.progress(1, 0.0)), *how)
        # the new folder has no checkpoint yet, and its losses may be of another text
        anew = {"saved": None, "rewinds": 0, "guarded": (), "losses": ()}
        position = replace(Position.of(self.checkpoint.scalars), **anew)
        same_seed = self.config.seed == config.seed
        if not same_seed:
            held = {name: array for name, array in held.items() if not name.startswith("random.")}
        progress = budget.progress(position.step + 1, position.elapsed)
        notes = [*self._take(trainer, held, progress), *self._place(position, corpus, same_seed)]
        resized = self.config.train.seq_len != config.train.seq_len
        if resized and "windows" in trainer.plan.arrangement:
            notes.append("the row length changed: some text of this epoch is read twice, some not")
        return position, tuple(notes)

    def _take(
        self, trainer: Trainer, old: Mapping[str, np.ndarray], progress: float
    ) -> Iterator[str]:
        """Load the arrays that match by name and shape into the trainer; yields notes on the others."""
        new, own = trainer.placeholders(), old
        old, lines = copy_leaders(trainer.plan, progress, own)
        fits = {
            name: array
            for name, array in old.items()
            if name in new and (new[name].shape, new[name].dtype) == (array.shape, array.dtype)
        }
        trainer.resume(new | fits)
        verb = "with the weights of" if self.weights_only else "branched from"
        yield f"{verb} step {self.checkpoint.step:,} of {self.out}"
        yield from lines
        anew = sorted(name for name in new if name not in fits)
        if weights := [name for name in anew if name.startswith(("model.", "state."))]:
            yield f"newly initialised weights: {few(weights)}"
        state = [name for name in anew if name.startswith("optimizer.")]
        if state and not self.weights_only:
            yield f"newly initialised optimizer state: {few(state)}"
        derived = ("random.", VIEWED)
        if left := sorted(n for n in own if n not in new and not n.startswith(derived)):
            yield f"dropped, because this model has no place for it: {few(left)}"

    def _place(self, position: Position, corpus: Corpus, same_seed: bool) -> Iterator[str]:
        """Keep the place in the data if data and order are the same, else read them from their start."""
        if self.checkpoint.scalars.get("fingerprint") != corpus.fingerprint:
            position.cursor, position.before = {}, position.tokens
            yield "the data or their order changed: they are read from the start"
        elif not same_seed:
            position.cursor = {k: v for k, v in position.cursor.items() if k != "random"}

    def _check_tokenizer(self, corpus: Corpus, config: Config) -> None:
        own = self.out / TOKENIZER
        if not own.exists() or corpus.tokenizer is None:
            return
        vocab = config.model.vocab
        known = Tokenizer.load(own, vocab, self.config.data.end_of_text)
        known.reserve(corpus.asked.specials, vocab)  # reserved in the run's tokenizer as well
        if known.digest != corpus.tokenizer.digest:
            what = "the tokenizer is not the one that the branched run's weights were trained with"
            raise DataError(what, where=str(own), fix=f"data.tokenizer={quoted(own)}")
