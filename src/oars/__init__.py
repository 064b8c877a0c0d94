"""manyoars: a training script written for one process runs, unchanged, on any number of ranks.

Scripts need not import this. The command is ``oars``; see ``oars --help``. For scripts there are ``oars.keep``
(docs/snapshots.md) and ``oars.data.open`` (docs/data.md).
"""

from oars import data
from oars.kept import keep

__all__ = ["data", "keep"]
__version__ = "0.1.0"
