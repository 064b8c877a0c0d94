"""Snapshots of PyTorch scripts: the recorder notes what a script was given, the player gives it again."""
