"""Metal kernels for MLX, as candidates for minillm's ops; and the emulator that tests them."""
