"""The commands ablate, bench, report and doctor: one file a command."""
