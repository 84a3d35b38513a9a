"""Reading a model directory, ours or another's: everything is checked before it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.checkpoint import strict
from minillm_core.checkpoint.directory.document import model_of
from minillm_core.checkpoint.directory.layout import Layout, Tensor
from minillm_core.checkpoint.directory.tensors import WIDEN, Stored, regular, stored_tensors
from minillm_core.checkpoint.directory.write import INDEX, WEIGHTS
from minillm_core.config.schema import ModelConfig
from minillm_core.errors import Refusal

__all__ = ["ModelDirectory", "read_model_directory"]

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True)
class ModelDirectory:
    """A model directory that can be read; its tensors are not read yet."""

    path: Path
    layout: Layout
    model: ModelConfig
    stored: Mapping[str, Stored]  # of every tensor, by its name there
    notes: tuple[str, ...] = ()  # what a person should know

    @property
    def settings(self) -> dict[str, Any]:
        """What a run must be told to be of this model: ``model.*``, ``data.tokenizer``."""
        found = {f"model.{key}": value for key, value in self.model.model_dump().items()}
        if (self.path / TOKENIZER).is_file():
            found["data.tokenizer"] = str(self.path / TOKENIZER)
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """``model.<parameter>`` of the plain model -> float32.

        Weights of a norm on queries and keys are ``model.layers.<i>.attention.qk.<q or k>``.

        Raises:
            Refusal: one cannot be read, or is not finite.
        """
        return {
            f"model.{tensor.place}": self.stored[name].read()
            for name, tensor in self._tensors.items()
        }

    def ones(self, name: str) -> bool:
        """True for what may be missing in a model where it is all ones."""
        return any(t.ones and f"model.{t.place}" == name for t in self._tensors.values())

    @cached_property
    def digest(self) -> str:
        """sha256 of config.json and of every file of tensors."""
        paths = {self.path / CONFIG, *(stored.path for stored in self.stored.values())}
        digest = hashlib.sha256()
        for path in sorted(paths):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return self.layout.tensors(self.model)


def read_model_directory(path: Path) -> ModelDirectory:
    """Look at a model directory and check all of it but the numbers.

    Raises:
        Refusal: it is none, or not of a model that minillm's decoder can be.
    """
    if not path.is_dir() or not os.path.lexists(path / CONFIG):
        raise Refusal(
            f"{path} is no model directory",
            where=str(path / CONFIG) if path.is_dir() else "there is no such folder",
            fix="give a folder with config.json and model.safetensors, as minillm export writes it",
        )
    layout, model = model_of(_json(path / CONFIG), str(path / CONFIG))
    stored = _stored(path)
    _check(layout.tensors(model), stored, path, tied=model.tied)
    notes = ()
    if not (path / TOKENIZER).is_file():
        notes = (f"{path} has no {TOKENIZER}: its model knows other ids than a new one would give",)
    return ModelDirectory(path, layout, model, stored, notes)


def _json(path: Path) -> dict[str, Any]:
    regular(path)
    try:
        with path.open("rb") as file:
            return strict.parse(file.read(strict.LARGEST + 1))
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path.name} cannot be read: {error}"[:200],
            where=str(path),
            fix="fetch or write the directory again",
        ) from error


def _stored(folder: Path) -> dict[str, Stored]:
    """Every tensor, from one file or from the shards that the index names."""
    if (folder / WEIGHTS).exists():
        return stored_tensors(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        raise Refusal(
            f"only {pickled[0]} is there: a pickle, which may run code, and is not read"
            if pickled
            else f"there is neither {WEIGHTS} nor {INDEX}",
            where=str(folder),
            fix="load and save the model with Transformers, which writes safetensors",
        )
    held = _json(folder / INDEX).get("weight_map")
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held.values()):
        raise Refusal(f"{INDEX} has no weight_map of names", where=str(folder / INDEX))
    found: dict[str, Stored] = {}
    for name in sorted(set(held.values())):
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise Refusal(
                f"{name[:80]!r} is not the name of a file in this folder",
                where=str(folder / INDEX),
            )
        found |= stored_tensors(folder / name)
    wrong = {key for key in found.keys() | held.keys() if held.get(key) != _file(found, key)}
    if wrong:
        raise Refusal(
            f"{INDEX} and the shards disagree about {min(wrong)[:80]}", where=str(folder / INDEX)
        )
    return found


def _file(found: Mapping[str, Stored], key: str) -> str | None:
    return found[key].path.name if key in found else None


def _check(
    wanted: Mapping[str, Tensor], stored: dict[str, Stored], folder: Path, *, tied: bool
) -> None:
    """Each tensor is there, as large as config.json says, and no other; drops doubles."""
    for name in [name for name in stored if name.endswith(".rotary_emb.inv_freq")]:
        del stored[name]  # follows from rope_theta; old versions of Transformers saved it
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if tied and head in stored and embedding in stored:
        if not np.array_equal(stored[head].read(), stored[embedding].read()):
            raise Refusal(
                "the head is tied to the embedding by config.json, and has other values",
                where=str(stored[head].path),
                fix="set tie_word_embeddings in config.json to false",
            )
        del stored[head]
    missing, unknown = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    if missing or unknown:
        name, what = (min(missing), "misses") if missing else (min(unknown), "has")
        raise Refusal(
            f"the directory {what} the tensor {name[:80]}, of {len(missing)} missing and "
            f"{len(unknown)} unknown ones",
            where=str(folder),
            fix="give a directory of a plain Llama or Qwen3 model",
        )
    for name, tensor in wanted.items():
        found = stored[name]
        if found.shape != tensor.shape:
            raise Refusal(
                f"{name} has shape {found.shape}, and config.json says {tensor.shape}",
                where=str(found.path),
            )
        if found.dtype not in WIDEN:
            raise Refusal(
                f"{name} is of dtype {found.dtype}; {', '.join(WIDEN)} are read",
                where=str(found.path),
            )
