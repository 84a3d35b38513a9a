"""Checkpoints that are whole or not there: safetensors, JSON, a manifest of digests, one rename.

OUT/checkpoints/step-00000100/
    model.safetensors       model.<parameter>, float32
    optimizer.safetensors   optimizer.<stage>.<entry>.<parameter>, state.<name>
    state.json              every scalar: cursor, tokens so far, seed ...
    manifest.json           written last: name, size and xxh3-128 of each of the others
"""

from __future__ import annotations

from minillm_core.checkpoint.commit import commit, discard, retain, sweep
from minillm_core.checkpoint.lock import lock
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import (
    Checkpoint,
    newest,
    newest_and_set_aside,
    newest_or_refuse,
)
from minillm_core.checkpoint.stray import put_away
from minillm_core.checkpoint.writer import Result, Writer

__all__ = [
    "Checkpoint",
    "Result",
    "Writer",
    "commit",
    "discard",
    "lock",
    "newest",
    "newest_and_set_aside",
    "newest_or_refuse",
    "put_away",
    "retain",
    "sweep",
    "verify",
]
