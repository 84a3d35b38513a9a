"""Checkpoints that are whole or not there: safetensors, JSON, a manifest of digests, one rename.

OUT/checkpoints/step-00000100/
    model.safetensors       model.<parameter>, float32
    optimizer.safetensors   optimizer.<stage>.<entry>.<parameter>, state.<name>
    state.json              every scalar: cursor, tokens so far, seed ...
    manifest.json           written last: name, size and xxh3-128 of each of the others
"""

from __future__ import annotations

from minillm_core.checkpoint.commit import commit, retain, sweep
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import Checkpoint, newest, newest_or_refuse

__all__ = ["Checkpoint", "commit", "newest", "newest_or_refuse", "retain", "sweep", "verify"]
