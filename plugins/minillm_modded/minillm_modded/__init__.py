"""Techniques of the modded-nanogpt speed records, as plugins of minillm."""
