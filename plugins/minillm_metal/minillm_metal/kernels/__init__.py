"""The ops by Metal kernels: one module per op, imported when the kernel is selected."""
