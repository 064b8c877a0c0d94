"""Plays several scripts one after another in one process, for starting ranks takes longer than most of them do."""

import runpy
import sys
from pathlib import Path

for name in sys.argv[1:]:
    path = Path(__file__).with_name(f"{name}.py")
    sys.argv = [str(path)]
    print(f"== ({name})")
    runpy.run_path(str(path), run_name="__main__")
