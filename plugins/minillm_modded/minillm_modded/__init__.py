"""Techniques of modded-nanogpt, one file each."""
