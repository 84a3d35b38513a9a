"""One op a file: the kernels of the core on MLX."""
