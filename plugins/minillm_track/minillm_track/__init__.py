"""Observers of a run: experiment trackers, and pauses between steps."""
