"""manyoars: a training script written for one process runs, unchanged, on any number of ranks.

Scripts need not import this. The command is ``oars``; see ``oars --help``. One function is for scripts: ``oars.keep``.
"""

from oars.kept import keep

__all__ = ["keep"]
__version__ = "0.1.0"
