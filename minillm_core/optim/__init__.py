"""Optimizers as update rules made of stages, and schedules: pure functions, written once for all frameworks."""
