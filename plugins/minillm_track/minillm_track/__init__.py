"""Experiment trackers as observers."""
