"""A complete plugin of minillm, to be read in five minutes: a z-loss."""
