"""The verbs of the command line: one file for each, no argument parsing."""
