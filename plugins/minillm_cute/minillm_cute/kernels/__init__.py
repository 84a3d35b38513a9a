"""The ops by CuTe kernels: one module per op, imported when the kernel is selected; and their check of the GPU."""
