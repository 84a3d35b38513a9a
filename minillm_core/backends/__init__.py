"""Frameworks behind one interface (base.py). Only the packages in this folder import torch or mlx."""
