"""Checkpoints that are whole or not there, for one trainer and any number of readers.

OUT/lock.json               who trains here (lock)
OUT/checkpoints/
    best.json               the step with the lowest held-out loss, with checkpoint.best
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

from minillm_core import disk, strict
from minillm_core.checkpoint.commit import archive_orphans, commit, discard, retain, sweep
from minillm_core.checkpoint.lock import Held, lock
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import (
    Checkpoint,
    chosen_or_refuse,
    newest,
    newest_and_set_aside,
    newest_or_refuse,
)
from minillm_core.checkpoint.writer import Result, Writer
from minillm_core.disk import read_file, read_lines

LARGEST_TOKENIZER = 1 << 26
"""Bytes of a tokenizer.json; one of 256,000 entries has half of that."""

__all__ = [
    "LARGEST_TOKENIZER",
    "Checkpoint",
    "Held",
    "Result",
    "Writer",
    "archive_orphans",
    "chosen_or_refuse",
    "commit",
    "discard",
    "disk",
    "lock",
    "newest",
    "newest_and_set_aside",
    "newest_or_refuse",
    "read_file",
    "read_lines",
    "retain",
    "strict",
    "sweep",
    "verify",
]
