"""Finding, loading and asking plugins; slots, and how what they say is merged."""
