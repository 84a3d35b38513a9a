"""The ops by Liger's functions: one module per op, imported when the kernel is selected."""
