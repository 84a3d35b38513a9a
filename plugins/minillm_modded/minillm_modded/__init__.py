"""The tricks of modded-nanogpt, one file each."""
