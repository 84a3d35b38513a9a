"""A command of minillm from a distribution of its own."""
