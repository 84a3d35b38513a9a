"""The ops by Triton: one module per op, imported if the kernel is selected."""
