"""The command line: one file a command. Nothing heavy is imported until a command runs."""
