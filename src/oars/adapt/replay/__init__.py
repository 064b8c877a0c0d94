"""The framework-free half of snapshots and resume: the tape, random streams, output and files while it plays."""
