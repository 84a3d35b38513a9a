"""The ops: their contracts, and kernel selection. Imports no framework."""
