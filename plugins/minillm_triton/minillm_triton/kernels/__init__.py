"""The ops by Triton: one module per op, imported where the kernel is selected."""
