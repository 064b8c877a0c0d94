"""How ranks talk: NumPy buffers in, NumPy buffers out. Knows no framework and no file format."""
