"""Frameworks behind one seam (base.py). Only the folders here import torch or mlx."""

from minillm_core.backends.bind import bind, create

__all__ = ["bind", "create"]
