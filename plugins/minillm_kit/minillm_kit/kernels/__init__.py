"""Kernels tested in isolation: their list, their correctness, and their speed.

From the inside out: examples.py has the test calls of each op, problem.py their results in float64,
calls.py, on_torch.py and on_mlx.py call a kernel on a framework, trial.py tests a kernel on a call,
check.py iterates over kernels, dtypes and calls. offers.py finds the kernels; listing.py shows which a
machine uses; workloads.py and bench.py time them. of_plugin.py is the check ``kernel`` of a plugin.
"""
