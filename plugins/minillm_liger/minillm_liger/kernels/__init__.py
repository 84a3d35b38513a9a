"""The ops by Liger's functions: one module an op, imported where it was chosen."""
