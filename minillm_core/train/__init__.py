"""The run: the one loop, what it tells, what it records, and the job around it."""
