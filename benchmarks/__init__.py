"""Measurements: each script prints its figures and writes them to benchmarks/results/."""
