"""Loaders: a rank reads its own samples of each batch, and the script gets the global batch."""
