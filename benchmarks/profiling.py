"""A step's time by kernel, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["profiled"]

LISTED = 40


def profiled(step: Callable[[], None], *, gpu: bool) -> dict[str, Any]:
    """Profile one step: the device's busy time, and its kernels, the longest first.

    Args:
        step: runs one step.
        gpu: count CUDA kernels; else operators on the CPU.
    """
    step()
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as trace:
        step()
        if gpu:
            torch.cuda.synchronize()
    field = "self_device_time_total" if gpu else "self_cpu_time_total"
    rows = sorted(trace.key_averages(), key=lambda row: getattr(row, field), reverse=True)
    return {
        "busy_seconds": sum(getattr(row, field) for row in rows) / 1e6,
        "kernels": [
            {"name": row.key[:160], "seconds": getattr(row, field) / 1e6, "calls": row.count}
            for row in rows[:LISTED]
        ],
    }
