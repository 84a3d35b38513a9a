"""Plugin discovery, loading and hook calls; slots, and how the entries of several plugins are merged."""
