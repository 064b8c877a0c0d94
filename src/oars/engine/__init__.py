"""How ranks talk: NumPy buffers in, NumPy buffers out. Knows no framework and no file format."""


class Astray(BaseException):
    """A rank that is not where the others are was about to meet them. Shown as one line; no script's to catch."""
