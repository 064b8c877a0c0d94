"""Ranks that do not wait for each other: ``--sync local``, ``gossip`` and ``server``."""
