"""The child process: one rank, which runs the user's script as ``python script.py`` would, and its record."""
