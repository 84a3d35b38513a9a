"""minillm's own Triton kernels as candidates for its ops; the entry point names the plugin's module."""
