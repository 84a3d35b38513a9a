"""The ops: contracts, and the choice of a kernel. Imports no framework."""
