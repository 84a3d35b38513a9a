"""Starting from a model directory: what it says of itself as settings, and its weights."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Trainer
from minillm_core.checkpoint.directory import Fitted, ModelDirectory, fit, read_model_directory
from minillm_core.checkpoint.directory.read import CONFIG
from minillm_core.config.origins import Layer, Setting
from minillm_core.errors import Refusal
from minillm_core.plan import Plan
from minillm_core.text import few
from minillm_core.train.record import RUN

__all__ = ["Initial", "initial_layer"]


def initial_layer(directory: str | None) -> Layer | None:
    """The shape and the tokenizer of a model directory as settings; None without one.

    Raises:
        Refusal: it is no model directory, or one that cannot be started from.
    """
    if directory is None:
        return None
    path, layer = Path(directory), Layer()
    if (path / RUN).is_file() and not (path / CONFIG).exists():
        raise Refusal(
            f"{path} is the folder of a run, not a model directory",
            where=f"--init {directory}",
            fix=f"minillm export {shlex.quote(directory)} --to DIR, then --init DIR",
        )
    for key, value in read_model_directory(path).settings.items():
        layer.add(key, Setting(value, f"--init {directory}", f"{directory}/config.json"))
    return layer


@dataclass(frozen=True)
class Initial:
    """The weights that a run starts from."""

    directory: ModelDirectory
    fitted: Fitted

    @classmethod
    def of(cls, directory: str, plan: Plan) -> Initial:
        """Read a directory for a plan.

        Raises:
            Refusal: it is none, or its weights do not fit the plan.
        """
        found = read_model_directory(Path(directory))
        return cls(found, fit(plan, found))

    def load(self, trainer: Trainer) -> Iterator[str]:
        """Give the trainer the weights; yields what a person should be told."""
        trainer.load(trainer.arrays() | self.fitted.arrays)
        yield f"the weights are those of {self.directory.path}"
        yield from self.directory.notes
        if own := self.fitted.initial:
            yield f"not in there, and as new: {few(own)}"

    def data(self) -> dict[str, Any]:
        """For run.json."""
        return {"directory": str(self.directory.path), "digest": self.directory.digest}
