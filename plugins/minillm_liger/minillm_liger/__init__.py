"""Liger's kernels as candidates for minillm's ops. The entry point names the module that has them."""
