"""Third-party CuTe kernels as candidates for minillm's ops; the entry point names the plugin's module."""
