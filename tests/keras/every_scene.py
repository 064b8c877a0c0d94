"""Every scene on every backend, on one process and on 2 and 3 ranks: make test-keras. (make test plays some of them.)

    python tests/keras/every_scene.py                                   # about 15 minutes on 2 cores
    python tests/keras/every_scene.py --backend jax --ranks 3 dropout callbacks
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "contract")]
from playing import BACKENDS, played, unlike  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=list(BACKENDS), help="only this one")
    parser.add_argument("--ranks", type=int, help="only so many")
    parser.add_argument("scenes", nargs="*", help="only these")
    args = parser.parse_args()
    failed = 0
    for backend in [args.backend] if args.backend else BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            for n in (0, args.ranks) if args.ranks else (0, 2, 3):
                began = time.monotonic()
                run = played(backend, n, args.scenes, Path(folder, str(n)), limit=1200)
                run.end()
                if n == 0:
                    one, told = run, "" if run.code == 0 else f"the script itself fails:\n{run}"
                else:
                    told = unlike(one, run)
                failed += bool(told)
                print(f"{backend}, {f'{n} ranks' if n else 'one process'}, {time.monotonic() - began:.0f} s:",
                      told or "the same", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
