"""The ops by Liger's functions: one module per op, imported where the kernel is selected."""
