"""A frozen model beside the trained one: a run's folder, read when a run starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.data import Tokenizer
from minillm_core.errors import DataError, Refusal
from minillm_core.plan import Plan
from minillm_core.train.restore import SavedModel, open_run
from minillm_core.train.run_folder import TOKENIZER


class FrozenModel:
    """The newest checkpoint of a run, as a reference model of another run: ``loss.reference(name, model)``.

    Constructing it reads nothing: a trained model whose reference is gone can still be read.

    Args:
        path: the run's folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.notes: list[str] = []  # to show to the user once it is read

    @cached_property
    def saved(self) -> SavedModel:
        """The saved model in the folder.

        Raises:
            Refusal: the folder holds no run, or plugins make its batches.
        """
        saved = open_run(Path(self.path), say=self.notes.append)
        if saved.plan.on_batch:
            raise Refusal(
                f"on_batch of plugin '{saved.plan.on_batch[0]}' made the batches of this model: it "
                "cannot read those of another run",
                where=self.path,
                fix="a reference that was trained without it",
            )
        return saved

    @property
    def plan(self) -> Plan:
        """The plan of the frozen model."""
        return self.saved.plan

    def arrays(self) -> dict[str, np.ndarray]:
        """Read the model's parameters and state, float32, by their names in a checkpoint."""
        return self.saved.arrays()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The model's identity: its plan's hash, and sha256 of its arrays."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return {"plan_hash": self.plan.hash, "weights": digest.hexdigest()}


def described(plan: Plan) -> dict[str, Any]:
    """Describe the references of a plan for run.json, by name."""
    return {one.name: {"path": one.model.path, **one.model.identity} for one in plan.references}


def check_references(
    plan: Plan, tokenizer: Tokenizer | None, recorded: Mapping[str, Any] | None
) -> Iterator[str]:
    """Check the reference models of a plan; yields notes for the user.

    Args:
        plan: the plan.
        tokenizer: of the run's text.
        recorded: :func:`described` of the resumed run; None: the run is new.

    Raises:
        Refusal: a reference cannot be read, or differs from the one that the run began with.
        DataError: a reference has another vocabulary or tokenizer.
    """
    for one in plan.references:
        model, vocab, before = one.model, plan.config.model.vocab, (recorded or {}).get(one.name)
        own, held = model.plan.config.model.vocab, model.saved.tokenizer
        fix = f"train with its tokenizer: data.tokenizer={model.path}/{TOKENIZER} model.vocab={own}"
        if own != vocab:
            what = f"the reference knows {own:,} ids, and model.vocab is {vocab:,}"
            raise DataError(what, where=model.path, fix=fix)
        if held is not None and tokenizer is not None and held.digest != tokenizer.digest:
            what = "the tokenizer of the reference is not the run's"
            raise DataError(what, where=model.path, fix=fix)
        if recorded is not None and before != {**(before or {}), **model.identity}:
            what = f"the reference '{one.name}' is not the model that the run began with"
            fix = "give the folder as it was: a checkpoint that came later changes it"
            raise Refusal(what, where=model.path, fix=fix)
        yield from (f"reference '{one.name}': {line}" for line in model.notes)
