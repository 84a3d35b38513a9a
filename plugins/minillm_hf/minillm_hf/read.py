"""Reading a model directory of any program: everything is validated before use."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minillm_core import Plan, Refusal
from minillm_core.commands import plain
from minillm_core.directories import (
    LARGEST_JSON,
    LARGEST_TOKENIZER,
    WIDTHS,
    Fitted,
    ModelConfig,
    Stored,
    parse_json,
    tensor_places,
)
from minillm_core.documents import END_OF_TEXT
from minillm_core.inspection import Deferred
from minillm_hf.hub import CONFIG, published
from minillm_hf.layouts import Layout, Tensor, model_of
from minillm_hf.match import check_fit, fit
from minillm_hf.scaling import Scaling
from minillm_hf.write import INDEX, WEIGHTS

T = TypeVar("T")

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_OF_TEMPLATES = ("chat_template", "added_tokens_decoder", "bos_token", "eos_token")
"""Keys of tokenizer_config.json that define the chat template and its tokens."""
LARGEST_TEMPLATE = 1 << 21  # bytes
ADAPTER_CONFIG = "adapter_config.json"
AGAIN = "fetch or write the directory again"
LONGEST_TOKEN = 200
"""Maximum characters of a special token."""
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


def _bfloat16(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)  # NumPy has no bfloat16


WIDEN: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "F32": ("<f4", lambda raw: raw.astype(np.float32, copy=False)),
    "F16": ("<f2", lambda raw: raw.astype(np.float32)),
    "BF16": ("<u2", _bfloat16),
}
"""safetensors dtype -> NumPy dtype of its bytes, and the lossless conversion to float32."""


@dataclass(frozen=True)
class FileTensor:
    """A lazily read tensor of a safetensors file."""

    path: Path
    name: str
    stored: Stored

    def read(self) -> np.ndarray:
        """Read the tensor as float32.

        Raises:
            Refusal: the file is truncated, or a value is NaN or infinite.
        """
        shape = self.stored.shape
        array = self._rows(0, shape[0] if shape else 1).reshape(shape)
        if not np.isfinite(array).all():
            raise Refusal(
                f"{self.name} holds a NaN or an infinity",
                where=str(self.path),
                fix=f"give an earlier version of the model, or {AGAIN}",
            )
        return array

    def deferred(self) -> Deferred:
        """Validate the values in one read; return a deferred array, which rereads rows on demand."""
        self.read()
        return Deferred(self.stored.shape, np.dtype(np.float32), self._rows)

    def _rows(self, first: int, count: int) -> np.ndarray:
        raw, widen = WIDEN[self.stored.dtype]
        inner = self.stored.shape[1:]
        numbers = math.prod(inner)
        place = self.stored.start + first * numbers * np.dtype(raw).itemsize
        array = np.fromfile(self.path, raw, count * numbers, offset=place)
        if array.size != count * numbers:
            raise Refusal(
                f"{self.path.name} ends before {self.name} does", where=str(self.path), fix=AGAIN
            )
        return widen(array).reshape(count, *inner)


@dataclass(frozen=True)
class HuggingFaceDirectory:
    """A validated model directory; its tensors are read lazily."""

    path: Path
    layout: Layout
    model: ModelConfig
    scaling: Scaling | None  # of the rotary frequencies
    positions: int | None  # max_position_embeddings
    stored: Mapping[str, FileTensor]  # every tensor by its name there
    end_of_text: str | None = None  # eos_token of the tokenizer's config
    begins: str | None = None  # bos_token, where the tokenizer prepends it; not end_of_text
    chat_template: str | None = None  # as JSON, with its special tokens
    notes: tuple[str, ...] = ()  # for the user

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run of this model: ``model.*``, ``train.lr``, tokenizer and chat template."""
        found = {f"model.{key}": value for key, value in self.model.model_dump().items()}
        found["train.lr"] = tuning_rate(self.model.dim)
        if (self.path / TOKENIZER).is_file():
            found["data.tokenizer"] = str(self.path / TOKENIZER)
            if self.end_of_text not in (None, END_OF_TEXT):
                found["data.end_of_text"] = self.end_of_text
            if self.chat_template is not None:
                found["sft.template"] = self.chat_template
        return found

    def arrays(self) -> dict[str, Deferred]:
        """Return ``model.<parameter>`` -> deferred float32 array, after checking the values one by one.

        Weights of a norm on queries and keys are ``model.layers.<i>.attention.qk.<q or k>``, biases
        ``attention.qk.q_bias``, ``attention.qk.k_bias`` and ``attention.v_terms.v_bias``.

        Raises:
            Refusal: a tensor cannot be read, or is not finite.
        """
        return {
            f"model.{tensor.place}": self.stored[name].deferred()
            for name, tensor in self.tensors.items()
        }

    @property
    def published(self) -> str | None:
        """``OWNER/NAME@COMMIT`` in the hub's cache; None: another folder."""
        return published(self.path)

    @property
    def plugins(self) -> dict[str, Mapping[str, Any]]:
        """The plugins that the model needs, each with its options."""
        needed = dict(self.layout.plugins)
        if self.scaling is not None:
            given = {key: v for key, v in self.scaling.options.items() if v is not None}
            needed[self.scaling.plugin] = given
        return needed

    @cached_property
    def digest(self) -> str:
        """The sha256 digest of config.json and every safetensors file."""
        paths = {self.path / CONFIG, *(stored.path for stored in self.stored.values())}
        digest = hashlib.sha256()
        for path in sorted(paths):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def check(self, plan: Plan) -> None:
        """Check that a plan has the directory's model sizes and plugins, without reading tensors.

        Raises:
            ConfigError: a model setting differs from the directory's.
            PlanError: the plan lacks a plugin.
        """
        check_fit(plan, self)

    def fit(self, plan: Plan) -> Fitted:
        """Match the directory's tensors to the parameters of a plan's model.

        Raises:
            ConfigError: a model setting differs from the directory's.
            PlanError: the plan has no parameter for a tensor, or one of another shape.
        """
        return fit(plan, self)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that layout and sizes require, by their names there."""
        return self.layout.tensors(self.model)


def tuning_rate(dim: int) -> float:
    """Return the default learning rate for fine-tuning a model of width ``dim``.

    2e-5 at 4,096 features, as is usual for models of 7 billion parameters; in inverse proportion to the
    width (arXiv:2203.03466), up to 3e-4.
    """
    return float(f"{min(3e-4, 2e-5 * 4096 / dim):.2g}")


def lacks_config(path: Path) -> bool:
    """Return whether a folder has a model's weights and no config.json; a run's checkpoint has a manifest."""
    others = (CONFIG, ADAPTER_CONFIG, "manifest.json")
    return (
        path.is_dir()
        and any(path.glob("model*.safetensors"))
        and not any(os.path.lexists(path / name) for name in others)
    )


def read_model_directory(path: Path) -> HuggingFaceDirectory:
    """Open a model directory and validate everything but the tensor values.

    Raises:
        Refusal: not a model directory, or of a model that minillm's decoder does not support.
    """
    if lacks_config(path):
        raise Refusal(
            f"{path} looks like a model directory, and its {CONFIG} is missing",
            where=f"there is no {path / CONFIG}",
            fix=f"copy {CONFIG} there from where the weights came from, or write the directory again: "
            "minillm export RUN --to DIR",
        )
    if not path.is_dir() or not os.path.lexists(path / CONFIG):
        raise Refusal(
            f"{path} is not a model directory",
            where=str(path / CONFIG) if path.is_dir() else "there is no such folder",
            fix="give a folder with config.json and model.safetensors, as minillm export writes it",
        )
    config = read_json(path / CONFIG)
    layout, model, scaling = model_of(config, str(path / CONFIG))
    positions = positions_of(config)
    stored = _stored(path)
    _check(layout.tensors(model), stored, path, tied=model.tied)
    notes, tokenizer = [], path / TOKENIZER
    if pickled := _pickles(path):
        notes.append(
            f"{', '.join(pickled)} of {path}: a pickle, which may run code, and is not read"
        )
    if not tokenizer.is_file():
        notes.append(
            f"{path} has no {TOKENIZER}: a newly trained tokenizer would not match the ids that the model "
            "was trained on"
        )
    elif tokenizer.stat().st_size > LARGEST_TOKENIZER:
        raise Refusal(
            f"{TOKENIZER} has more than {LARGEST_TOKENIZER:,} bytes",
            where=str(tokenizer),
            fix=AGAIN,
        )
    return HuggingFaceDirectory(
        path,
        layout,
        model,
        scaling,
        positions,
        stored,
        **tokenizer_facts(path),
        notes=tuple(notes),
    )


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Read the longest row of a config.json; None: not declared."""
    positions = config.get("max_position_embeddings")
    return positions if type(positions) is int and positions > 0 else None


def tokenizer_facts(folder: Path) -> dict[str, str | None]:
    """Read the tokens that end and begin a text, and the chat template; None: not declared.

    Returns:
        ``end_of_text``; ``begins``, None also where the tokenizer prepends no token, or the one that ends
        a text; and ``chat_template``, from tokenizer_config.json or chat_template.jinja, as JSON with the
        special tokens.

    Raises:
        Refusal: a file cannot be read, refers to code, or holds an invalid token.
    """
    path = folder / TOKENIZER_CONFIG
    if not os.path.lexists(path):
        return {"end_of_text": None, "begins": None, "chat_template": None}
    config = read_json(path)
    if config.get("auto_map") is not None:
        raise Refusal(
            f"{TOKENIZER_CONFIG} names code that comes with the directory, which is not run",
            where=f"{path}: auto_map",
            fix="give a directory whose tokenizer.json is all of its tokenizer, without auto_map",
        )
    ends, bos = (_token(config, key, path) for key in ("eos_token", "bos_token"))
    puts = bos is not None and bos != ends and _puts(folder, config, bos)
    template = _chat_template(folder, config)
    return {"end_of_text": ends, "begins": bos if puts else None, "chat_template": template}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template with its special tokens, as JSON; None: there is none."""
    path = folder / CHAT_TEMPLATE
    if os.path.lexists(path):
        _check_regular(path)
        try:
            with path.open("rb") as file:
                text = file.read(LARGEST_TEMPLATE + 1).decode("utf-8")
            if len(text) > LARGEST_TEMPLATE:
                raise ValueError(f"it has more than {LARGEST_TEMPLATE:,} bytes")
        except (OSError, ValueError) as error:
            problem = f"{path.name} cannot be read: {error}"[:200]
            raise Refusal(problem, where=str(path), fix=AGAIN) from error
        config = {**config, "chat_template": text}
    if config.get("chat_template") is None:
        return None
    return json.dumps({key: config[key] for key in _OF_TEMPLATES if config.get(key) is not None})


def _token(config: Mapping[str, Any], key: str, path: Path) -> str | None:
    found = config.get(key)
    token = found.get("content") if isinstance(found, dict) else found
    if token is not None and not (isinstance(token, str) and 0 < len(token) <= LONGEST_TOKEN):
        raise Refusal(
            f"{TOKENIZER_CONFIG} has {plain(str(found), 40)} for {key}, which is not a token",
            where=str(path),
            fix=AGAIN,
        )
    return token


def _puts(folder: Path, config: Mapping[str, Any], bos: str) -> bool:
    """Return whether a tokenizer prepends its bos token: by add_bos_token, or its post-processor."""
    if isinstance(said := config.get("add_bos_token"), bool):
        return said
    path = folder / TOKENIZER
    if not path.is_file() or path.stat().st_size > LARGEST_TOKENIZER:
        return False
    try:
        with path.open("rb") as file:
            processor = parse_json(file.read(LARGEST_TOKENIZER + 1)).get("post_processor")
    except (OSError, ValueError):
        return False  # reading the tokenizer reports the error
    several = processor.get("processors") if isinstance(processor, dict) else None
    for one in several if isinstance(several, list) else [processor]:
        parts = one.get("single") if isinstance(one, dict) else None
        first = parts[0] if isinstance(parts, list) and parts else None
        special = first.get("SpecialToken") if isinstance(first, dict) else None
        if isinstance(special, dict) and special.get("id") == bos:
            return True
    return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size.

    Raises:
        Refusal: it cannot be read.
    """
    return _read(path, LARGEST_JSON, parse_json)


def read_bytes(path: Path) -> bytes:
    """Read a file of bounded size.

    Raises:
        Refusal: it cannot be read, or is larger than a tokenizer.
    """
    return _read(path, LARGEST_TOKENIZER, _bounded)


def _read(path: Path, largest: int, parse: Callable[[bytes], T]) -> T:
    """Read at most one byte more than ``largest``, and parse them; a ValueError of ``parse`` is refused."""
    _check_regular(path)
    try:
        with path.open("rb") as file:
            return parse(file.read(largest + 1))
    except (OSError, ValueError) as error:
        problem = f"{path.name} cannot be read: {error}"[:200]
        raise Refusal(problem, where=str(path), fix=AGAIN) from error


def _bounded(content: bytes) -> bytes:
    if len(content) > LARGEST_TOKENIZER:
        raise ValueError(f"it has more than {LARGEST_TOKENIZER:,} bytes")
    return content


def _pickles(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)


def _stored(folder: Path) -> dict[str, FileTensor]:
    """Find every tensor, in a single file or the shards of the index."""
    if (folder / WEIGHTS).exists():
        return stored_tensors(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        pickled = _pickles(folder)
        raise Refusal(
            f"only {pickled[0]} is there: a pickle, which may run code, and is not read"
            if pickled
            else f"there is neither {WEIGHTS} nor {INDEX}",
            where=str(folder),
            fix="load and save the model with Transformers, which writes safetensors",
        )
    held = read_json(folder / INDEX).get("weight_map")
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held.values()):
        raise Refusal(f"{INDEX} has no weight_map of names", where=str(folder / INDEX), fix=AGAIN)
    found: dict[str, FileTensor] = {}
    for name in sorted(set(held.values())):
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise Refusal(
                f"{name[:80]!r} is not the name of a file in this folder",
                where=str(folder / INDEX),
                fix=AGAIN,
            )
        found |= stored_tensors(folder / name)
    there = {key: tensor.path.name for key, tensor in found.items()}
    if wrong := {key for key in there.keys() | held.keys() if held.get(key) != there.get(key)}:
        raise Refusal(
            f"{INDEX} and the shards disagree about {min(wrong)[:80]}",
            where=str(folder / INDEX),
            fix=AGAIN,
        )
    return found


def _check(
    wanted: Mapping[str, Tensor], stored: dict[str, FileTensor], folder: Path, *, tied: bool
) -> None:
    """Check that the tensors are exactly those of config.json, with their shapes; drop duplicates."""
    for name in [name for name in stored if name.endswith(".rotary_emb.inv_freq")]:
        del stored[name]  # computed from rope_theta; old versions of Transformers saved it
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
            fix="give a directory of a plain Llama, Qwen2 or Qwen3 model",
        )
    for name, tensor in wanted.items():
        found = stored[name]
        if found.stored.shape != tensor.shape:
            raise Refusal(
                f"{name} has shape {found.stored.shape}, and config.json says {tensor.shape}",
                where=str(found.path),
                fix=f"put the config.json there that the weights were saved with, or {AGAIN}",
            )
        if found.stored.dtype not in WIDEN:
            raise Refusal(
                f"{name} is of dtype {found.stored.dtype}; {', '.join(WIDEN)} are read",
                where=str(found.path),
                fix="load it with Transformers and save it in one of them: AutoModelForCausalLM"
                f".from_pretrained({str(folder)!r}, dtype='bfloat16').save_pretrained('converted')",
            )


def stored_tensors(path: Path) -> dict[str, FileTensor]:
    """Return every tensor of a file by name; the header is validated, the tensors are read lazily.

    Raises:
        Refusal: not a valid safetensors file.
    """
    _check_regular(path)
    try:
        with path.open("rb") as file:

            def fill(offset: int, memory: memoryview) -> None:
                file.seek(offset)
                if file.readinto(memory) != len(memory):
                    raise ValueError(f"ends before byte {offset + len(memory):,}")

            size = os.fstat(file.fileno()).st_size
            found = tensor_places(fill, size, WIDTHS)
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path.name} is not a sound safetensors file: {error}", where=str(path), fix=AGAIN
        ) from error
    return {name: FileTensor(path, name, stored) for name, stored in sorted(found.items())}


def _check_regular(path: Path) -> None:
    """Refuse a missing or non-regular file: reading a named pipe would block forever."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise Refusal(f"there is no {path.name}", where=str(path), fix=AGAIN) from error
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(f"{path.name} is not a file", where=str(path), fix=AGAIN)
