"""Trials that disturb a run on purpose: forked trainers, a tiny run, and the expected results."""
