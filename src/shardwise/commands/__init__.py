"""The command line: one file per command, each with its flags and what it prints."""
