"""The run: the one loop, its events, its records, and the job around it."""
