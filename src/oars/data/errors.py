"""The error of this room."""


class DataError(ValueError):
    """Something is wrong with a file or an option: one line says which, where, and what to do. Shown as such."""
