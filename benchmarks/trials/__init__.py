"""Trials that break a run on purpose: forked trainers, a tiny run, and what must come of it."""
