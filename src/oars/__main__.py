"""``python -m oars`` is ``oars``."""

import sys

from oars.cli import main

if __name__ == "__main__":
    sys.exit(main())
