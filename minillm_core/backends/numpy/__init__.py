"""NumPy in float64, forward only: the oracle."""
