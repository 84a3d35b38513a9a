"""Exports a trained model to a directory that Transformers, vLLM and mlx-lm load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.checkpoint.huggingface import (
    export_layout,
    exported,
    tokenizer_documents,
    write_directory,
)
from minillm_core.checkpoint.huggingface.write import SHARD_BYTES
from minillm_core.data import Tokenizer
from minillm_core.data.tokenizer import END_OF_TEXT
from minillm_core.plan import Plan


def export_model(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    to: Path,
    tokenizer: Tokenizer | None,
    tokenizer_text: str | None,
    *,
    say: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write a model directory; needs no framework.

    Args:
        plan: the model's.
        arrays: float32, ``model.<parameter>`` and ``state.<name>``.
        to: the model directory; it does not exist, or is empty.
        tokenizer: of its text; None: it was trained on ids.
        tokenizer_text: its tokenizer.json.
        say: prints notes.
        shard_bytes: of the largest file of tensors.

    Returns:
        ``directory``, ``layout``, ``parameters``, and ``files``: name -> bytes.

    Raises:
        Refusal: ``to`` is taken, or a plugin stands in the way.
    """
    layout, config = export_layout(plan), plan.config
    tensors = exported(plan, arrays)
    boundary = tokenizer.end_of_text if tokenizer else None
    positions = config.train.seq_len
    ends = {f"{name}_token_id": boundary for name in ("bos", "eos", "pad")}
    documents = {
        "config.json": layout.document(config.model, positions=positions, boundary=boundary),
        "generation_config.json": ends,
    }
    if tokenizer_text is None:
        say("the run was trained on ids: there is no tokenizer to write")
    else:
        files, notes = tokenizer_documents(
            tokenizer_text, boundary=END_OF_TEXT, positions=positions
        )
        documents |= files
        for note in notes:
            say(note)
    names = write_directory(to, tensors, documents, shard_bytes=shard_bytes)
    return {
        "directory": str(to),
        "layout": layout.name,
        "parameters": sum(array.size for array in tensors.values()),
        "files": {name: (to / name).stat().st_size for name in names},
    }
