"""The ops by Metal kernels: one module per op, imported where the kernel is selected."""
