"""Reading PEFT adapters: a base directory with the low-rank changes folded into its matrices.

    adapter_config.json         the base and its revision, rank and alpha
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight and lora_B.weight

Only LoRA of plain matrices is supported; other features are refused by their key in adapter_config.json.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import Refusal
from minillm_core.commands import plain
from minillm_core.directories import Stored
from minillm_core.inspection import Deferred
from minillm_hf.hub import fetch
from minillm_hf.read import (
    ADAPTER_CONFIG,
    AGAIN,
    CONFIG,
    TOKENIZER,
    WIDEN,
    FileTensor,
    HuggingFaceDirectory,
    read_json,
    read_model_directory,
    stored_tensors,
    tokenizer_facts,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"

_READ = {
    *("base_model_name_or_path", "revision", "peft_type", "r", "lora_alpha", "use_rslora", "bias"),
    *("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules"),
}
"""Keys that are applied, or implied by tensor names."""

_TRAINING = {
    *("auto_mapping", "inference_mode", "init_lora_weights", "lora_dropout", "megatron_core"),
    *("ensure_weight_tying", "peft_version", "qalora_group_size", "runtime_config", "task_type"),
}
"""Keys on training or loading by PEFT, which do not affect the computation."""

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Changed:
    """A tensor of the base plus a low-rank change, read lazily; like a :class:`FileTensor`."""

    base: FileTensor
    a: FileTensor
    b: FileTensor
    scale: float

    @property
    def path(self) -> Path:
        """The file of the base."""
        return self.base.path

    @property
    def stored(self) -> Stored:
        """The tensor's location in the file."""
        return self.base.stored

    def read(self) -> np.ndarray:
        """Read weight + scale B A, float32, the product in float64."""
        change = self.b.read().astype(np.float64) @ self.a.read().astype(np.float64)
        return (self.base.read() + self.scale * change).astype(np.float32)

    def deferred(self) -> Deferred:
        """Validate the values in one read; return a deferred array, which rereads all of it for any rows."""
        self.read()
        shape, dtype = self.stored.shape, np.dtype(np.float32)
        return Deferred(shape, dtype, lambda first, count: self.read()[first : first + count])


@dataclass(frozen=True)
class AdapterDirectory(HuggingFaceDirectory):
    """A directory with an adapter, and its base."""

    base: HuggingFaceDirectory | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of a run: the base's, with the adapter's own tokenizer if it has one."""
        assert self.base is not None
        return super().settings if (self.path / TOKENIZER).is_file() else self.base.settings

    @cached_property
    def digest(self) -> str:
        """Compute the sha256 digest of the base and both files of the adapter."""
        assert self.base is not None
        digest = hashlib.sha256(self.base.digest.encode())
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            with (self.path / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def read_adapter(path: Path) -> AdapterDirectory:
    """Open and validate an adapter and its base, except for tensor values.

    Raises:
        Refusal: the base is missing, or the adapter is not plain LoRA of the base's matrices.
    """
    config = read_json(path / ADAPTER_CONFIG)
    where = str(path / ADAPTER_CONFIG)
    scale, rank = _scale(config, where, path)
    folder = base_folder(config, where, lambda named: fetch(named, lambda line: None))
    base = read_model_directory(folder)
    pairs: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in _weights(path, config).items():
        if (found := _TENSOR.fullmatch(name)) is None or f"{found[1]}.weight" not in base.stored:
            raise _merge(f"{plain(name, 80)} changes nothing that the base has", path, config)
        if tensor.stored.dtype not in WIDEN:
            raise _merge(f"{plain(name, 80)} is of dtype {tensor.stored.dtype}", path, config)
        pairs.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
    if not pairs:
        raise Refusal("the adapter has no tensors", where=str(path / ADAPTER_WEIGHTS), fix=AGAIN)
    stored: dict[str, Any] = dict(base.stored)
    for name, pair in pairs.items():
        of_base = base.stored[name]
        shapes = {key: one.stored.shape for key, one in pair.items()}
        out, into = (*of_base.stored.shape, 0)[:2]
        if shapes != {"A": (rank, into), "B": (out, rank)}:
            raise Refusal(
                f"the adapter of {plain(name, 80)} has the shapes {shapes}, and the base "
                f"{of_base.stored.shape}",
                where=str(path / ADAPTER_WEIGHTS),
                fix="the base that it was trained on, in base_model_name_or_path",
            )
        stored[name] = Changed(of_base, pair["A"], pair["B"], scale)
    facts = {one.name: getattr(base, one.name) for one in fields(base)}
    if (path / TOKENIZER).is_file():
        facts |= tokenizer_facts(path)
    notes = (f"{path}: the adapter is folded into the weights of {base.path}", *base.notes)
    facts |= {"path": path, "stored": stored, "notes": notes}
    return AdapterDirectory(**facts, base=base)


def _scale(config: Mapping[str, Any], where: str, path: Path) -> tuple[float, int]:
    """Read the scale of B A, and the rank.

    Raises:
        Refusal: the adapter computes something else.
    """
    if config.get("peft_type") != "LORA":
        raise _merge(f"an adapter of the kind {str(config.get('peft_type'))[:40]!r}", path, config)
    known = _READ | _TRAINING
    more = sorted(key for key, value in config.items() if value and key not in known)
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        more.insert(0, "init_lora_weights")  # such as pissa: it changes the base too
    if config.get("bias", "none") != "none":
        more.insert(0, "bias")
    if more:
        raise _merge(f"an adapter with {plain(more[0], 40)}", path, config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= 1 << 16:
        raise Refusal(
            f"r is {str(rank)[:40]}, which is not a rank",
            where=where,
            fix="set r to the rank that the adapter was trained with, such as 8",
        )
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise Refusal(
            f"lora_alpha is {str(alpha)[:40]}, which is not a factor",
            where=where,
            fix="set lora_alpha to the number that the adapter was trained with, such as 16",
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank), rank


def base_folder(
    config: Mapping[str, Any], where: str, fetched: Callable[[str], Path | None]
) -> Path:
    """Find the folder of an adapter's base model: a folder, or a model of the hub at its revision.

    Args:
        config: the adapter_config.json.
        where: its path.
        fetched: returns the folder of ``OWNER/NAME`` or ``OWNER/NAME@REVISION``; None: there is none.

    Raises:
        Refusal: there is no such model here.
    """
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    fix = (
        "base_model_name_or_path: the model directory of the base (minillm export makes one of a "
        "run), or its name on the hub"
    )
    if not isinstance(named, str) or not named or "\0" in named:
        raise Refusal("the adapter does not say which model it changes", where=where, fix=fix)
    if revision is not None and not isinstance(revision, str):
        raise Refusal(
            f"revision is {plain(str(revision), 40)}, which is not a branch, tag or commit",
            where=where,
            fix="set revision to that of the base model, or to null for its main branch",
        )
    folder, asked = Path(named), f"{named}@{revision}" if revision else named
    if not folder.is_dir():
        folder = fetched(asked) or folder
    if not (folder / CONFIG).is_file():
        raise Refusal(
            f"the model that the adapter changes is not here: {plain(asked, 200)}",
            where=where,
            fix=fix,
        )
    return folder


def _weights(path: Path, config: Mapping[str, Any]) -> dict[str, FileTensor]:
    if not (path / ADAPTER_WEIGHTS).exists():
        pickled = (path / "adapter_model.bin").exists()
        what = "only adapter_model.bin is there: a pickle, which may run code, and is not read"
        raise Refusal(
            what if pickled else f"there is no {ADAPTER_WEIGHTS}",
            where=str(path),
            fix="load and save the adapter with PEFT, which writes safetensors",
        )
    return stored_tensors(path / ADAPTER_WEIGHTS)


def _merge(what: str, path: Path, config: Mapping[str, Any]) -> Refusal:
    base = plain(repr(config.get("base_model_name_or_path")), 100)
    return Refusal(
        f"{what} is not read here, LoRA of plain matrices is",
        where=str(path / ADAPTER_CONFIG),
        fix="fold it into its base with PEFT: PeftModel.from_pretrained("
        f"AutoModelForCausalLM.from_pretrained({base}), {plain(repr(str(path)), 100)})"
        ".merge_and_unload().save_pretrained('merged'), and its tokenizer; then --init merged",
    )
