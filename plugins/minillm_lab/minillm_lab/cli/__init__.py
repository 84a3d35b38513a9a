"""The commands of minillm-lab, one file per command."""
