"""The parent process: starts the ranks, shows the first rank's output, watches for stalls and deaths, cleans up."""
