"""Runs over several hosts: what reaches processes there, and what survives the loss of a host or a link."""
