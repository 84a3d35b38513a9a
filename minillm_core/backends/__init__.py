"""Frameworks behind one seam (base.py). Only the folders here import torch or mlx."""
