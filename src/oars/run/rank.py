"""One rank: started N times by the launcher, it runs the user's script as ``python script.py`` would.

The plan (``run.json`` in the run folder) says what to run; the environment says where the folder is.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from oars.engine.world import World
from oars.run.record import Record


def main() -> None:
    folder = Path(os.environ["OARS_RUN_FOLDER"])
    plan = json.loads((folder / "run.json").read_text())
    world = World.over_mpi() if plan["ranks"] > 1 else None
    record = Record(folder, voice=world is None or world.rank == 0)
    import oars.adapt.torch

    oars.adapt.torch.install(world, plan, record)
    sys.argv = [plan["script"], *plan["args"]]
    sys.path[0] = str(Path(plan["script"]).resolve().parent)
    if world is not None and world.rank:
        sys.stdout = open(folder / f"rank-{world.rank}.log", "w")
    runpy.run_path(plan["script"], run_name="__main__")
    record.close()


if __name__ == "__main__":
    main()
