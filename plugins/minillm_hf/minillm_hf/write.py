"""Writing a model directory atomically, by one rename."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from minillm_core import MinillmError, Refusal
from minillm_core.directories import (
    name_aside,
    refuse_taken,
    rename_path,
    stream_file,
    sync_path,
    tensor_file,
    write_file,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of one file, as Transformers writes them


def write_directory(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    documents: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
    dtype: str = "float32",
    weights: str = WEIGHTS,
) -> list[str]:
    """Write a model directory to a temporary sibling, and rename it once everything is on disk.

    Args:
        folder: the final path; must not exist, or be empty.
        tensors: by name in the directory, float32.
        documents: file name -> JSON, or verbatim text or bytes.
        shard_bytes: maximum of a file of tensors; a tensor is never split.
        dtype: of the written tensors, one of ``DTYPES``.
        weights: the name of the tensor file, if it is a single one.

    Returns:
        The names of the files.

    Raises:
        Refusal: the path is taken.
        MinillmError: writing failed; partial files are removed.
    """
    refuse_taken(folder)
    target = Path(os.path.realpath(folder))  # an empty folder may be reached through a link
    temporary = name_aside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        shards = list(_shards(tensors, shard_bytes, DTYPES[dtype].width))
        documents = {**documents, **_write_tensors(temporary, shards, weights, DTYPES[dtype])}
        for name, document in documents.items():
            text = document
            if not isinstance(text, (str, bytes)):
                text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            write_file(temporary / name, text.encode() if isinstance(text, str) else text)
        names = sorted(path.name for path in temporary.iterdir())
        sync_path(temporary)
        rename_path(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        refuse_taken(folder)  # by another process meanwhile
        size = sum(array.nbytes for array in tensors.values())
        kind = Refusal if isinstance(error, PermissionError) else MinillmError
        raise kind(
            f"the model directory could not be written: {error.strerror or error}",
            where=f"{folder}, {size / 1e6:,.1f} MB",
            fix="make room, or --to with another folder",
        ) from error
    _sweep(target)
    return names


def _sweep(target: Path) -> None:
    """Remove temporary folders of killed exports to ``target``; a running one would find its target taken."""
    leftover = re.compile(re.escape(target.name) + r"\.tmp-[0-9a-f]{16}")
    for path in target.parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # perhaps another account's


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to the nearest and ties to even: its bits, uint16 of the same shape."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Dtype:
    """A dtype of written tensors: its conversion from float32, its safetensors name, its bytes per element."""

    convert: Callable[[np.ndarray], np.ndarray]
    names: Mapping[np.dtype[Any], str]
    width: int


DTYPES: Mapping[str, Dtype] = {
    "float32": Dtype(lambda array: array, {np.dtype(np.float32): "F32"}, 4),
    "bfloat16": Dtype(bfloat16_bits, {np.dtype(np.uint16): "BF16"}, 2),
}


def _write_tensors(
    folder: Path, shards: list[dict[str, np.ndarray]], weights: str, dtype: Dtype
) -> dict[str, Any]:
    """Write the safetensors files; return the index of a sharded checkpoint, empty for a single file."""
    names = [weights]
    if len(shards) > 1:
        names = [
            f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        # older versions of Transformers require the metadata format "pt"
        converted = {key: dtype.convert(array) for key, array in shard.items()}
        stream_file(folder / name, tensor_file(converted, "pt", dtype.names))
    if len(shards) == 1:
        return {}
    held = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    size = sum(dtype.width * array.size for shard in shards for array in shard.values())
    return {INDEX: {"metadata": {"total_size": size}, "weight_map": dict(sorted(held.items()))}}


def _shards(
    tensors: Mapping[str, np.ndarray], shard_bytes: int, width: int
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors.items():
        if shard and size + width * array.size > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += width * array.size
    yield shard


def tokenizer_documents(
    text: str, *, boundary: str, positions: int, ends: str | None = None
) -> dict[str, Any]:
    """Build tokenizer.json and tokenizer_config.json; as in training, a text begins with the boundary.

    Args:
        text: the run's tokenizer.json.
        boundary: the token before every document.
        ends: the token that ends a text; None: the boundary.
        positions: the longest training row, in tokens.
    """
    native = tokenizers.Tokenizer.from_str(text)
    native.post_processor = processors.TemplateProcessing(
        single=[boundary, "$A"],
        pair=[boundary, "$A", "$B"],
        special_tokens=[(boundary, native.token_to_id(boundary))],
    )
    document = json.loads(native.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "bos_token": boundary,
        "eos_token": ends or boundary,
        "pad_token": ends or boundary,
        "unk_token": document["model"].get("unk_token"),
        "clean_up_tokenization_spaces": False,
        # the boundary token spelled out in a text is plain text, as in training
        "split_special_tokens": True,
    }
    return {"tokenizer.json": document, "tokenizer_config.json": config}
