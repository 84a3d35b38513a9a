"""From a run to a directory that Transformers, vLLM and mlx-lm load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minillm_core.checkpoint.directory import (
    export_layout,
    exported,
    refuse_taken,
    tokenizer_documents,
    write_directory,
)
from minillm_core.checkpoint.directory.write import SHARD_BYTES
from minillm_core.data.tokenizer import END_OF_TEXT
from minillm_core.train.restore import TOKENIZER, open_run

__all__ = ["export_run"]


def export_run(
    out: Path,
    to: Path,
    *,
    plugins: Mapping[str, str] | None = None,
    say: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """What ``minillm export OUT --to DIR`` does; needs no framework.

    Args:
        out: a run's folder.
        to: the model directory; it does not exist, or is empty.
        plugins: name -> what to load for it, for plugins that must be named again.
        say: is told what a person should know.
        shard_bytes: of the largest file of tensors.

    Returns:
        ``directory``, ``layout``, ``parameters``, ``step``, ``checkpoint``, and ``files``: name ->
        bytes.

    Raises:
        Refusal: ``to`` is taken, OUT holds no run or no checkpoint, or a plugin stands in the way.
        NoCheckpoint: none verifies.
    """
    refuse_taken(to)
    run = open_run(out, plugins=plugins, say=say)
    layout, config = export_layout(run.plan), run.config
    arrays = run.checkpoint.arrays("model.") | run.checkpoint.arrays("state.")
    tensors = exported(run.plan, arrays)
    boundary = run.tokenizer.end_of_text if run.tokenizer else None
    positions = config.train.seq_len
    ends = {f"{name}_token_id": boundary for name in ("bos", "eos", "pad")}
    documents = {
        "config.json": layout.document(config.model, positions=positions, boundary=boundary),
        "generation_config.json": ends,
    }
    if run.tokenizer is None:
        say("the run was trained on ids: there is no tokenizer to write")
    else:
        text = (out / TOKENIZER).read_text("utf-8")
        files, notes = tokenizer_documents(text, boundary=END_OF_TEXT, positions=positions)
        documents |= files
        for note in notes:
            say(note)
    names = write_directory(to, tensors, documents, shard_bytes=shard_bytes)
    return {
        "directory": str(to),
        "layout": layout.name,
        "parameters": sum(array.size for array in tensors.values()),
        "step": run.checkpoint.step,
        "checkpoint": str(run.checkpoint.path),
        "files": {name: (to / name).stat().st_size for name in names},
    }
