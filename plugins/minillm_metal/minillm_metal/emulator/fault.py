"""The error class of the emulator."""

from __future__ import annotations

__all__ = ["KernelFault"]


class KernelFault(Exception):
    """A faulty kernel: the fault, its position, and the lane."""
