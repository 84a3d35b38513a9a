"""Checkpoints that are complete or absent, for one trainer and any number of readers.

OUT/lock.json               the process that trains here (lock)
OUT/checkpoints/
    best.json               the step with the lowest held-out loss, with checkpoint.best
    step-00000100/
        model.safetensors       model.<parameter>, float32
        optimizer.safetensors   all other arrays: optimizer.*, state.*, scaler.*, random.*
        state.json              every scalar: cursor, tokens so far, seed ...
        manifest.json           written last: name, size and xxh3-128 of each of the others
    step-00000100.corrupt/      failed verification, set aside by a resume
    step-00000100.tmp-*/        being written or removed; swept at the next start
    step-00000100.old-*/        being replaced by a newer one of the same step; restored or swept

A trainer takes the lock, sweeps, finds the checkpoint to resume from (newest_and_set_aside), and saves
in the background (CheckpointWriter: commit, then retain). A reader takes no lock and changes nothing (newest,
newest_or_refuse); the checkpoint that it opened stays readable when the trainer removes it. Only
safetensors and JSON are read, no pickle, and both are checked to the last byte before any other use.
"""
