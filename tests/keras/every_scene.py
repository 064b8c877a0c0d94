"""Every scene on every backend, on 2 and 3 ranks: make test-keras. (make test plays some of them on each.)"""

import sys
import tempfile
from pathlib import Path

from test_keras import CASES, unlike  # isort: skip (it sets the path)
import test_contract

test_contract.LIMIT = 1200


def main():
    failed = 0
    for backend, script in dict.fromkeys((backend, script) for backend, script, _, _ in CASES):
        for n in (2, 3):
            with tempfile.TemporaryDirectory() as folder:
                told = unlike(backend, script, n, [], Path(folder))
            print(backend, script, n, told or "the same", flush=True)
            failed += bool(told)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
