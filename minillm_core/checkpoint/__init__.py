"""Checkpoints that are whole or not there, for one trainer and any number of readers.

OUT/lock.json               who trains here (lock)
OUT/checkpoints/
    step-00000100/
        model.safetensors       model.<parameter>, float32
        optimizer.safetensors   everything else: optimizer.*, state.*, scaler.*, random.*
        state.json              every scalar: cursor, tokens so far, seed ...
        manifest.json           written last: name, size and xxh3-128 of each of the others
    step-00000100.corrupt/      did not verify, set aside by a resume
    step-00000100.tmp-*/        being written or removed; swept at the next start
    step-00000100.old-*/        being replaced by a newer one of the same step; restored or swept

A trainer takes the lock, sweeps, finds where to go on (newest_and_set_aside), and saves in the
background (Writer: commit, then retain). A reader takes no lock and changes nothing (newest,
newest_or_refuse); what it found stays readable when the trainer removes it. Only safetensors and
JSON are read, no pickle, and both are checked to the last byte before anything else sees them.
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
