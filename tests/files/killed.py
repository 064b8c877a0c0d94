"""A script on two ranks (plain processes) whose voice is killed, against the same script under plain Python.

The survivor looks whether the voice lives between any two statements of the script, and goes on as the voice.
"""

from __future__ import annotations

import difflib
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from on_ranks import prepare, tree
from running import environment

from oars.adapt.files.library import PATH, preload

DRIVER = """
import ast, builtins, fcntl, os, sys
from pathlib import Path
rank, shared, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
alive = os.open(f"{shared}-alive", os.O_RDWR | os.O_CREAT) if rank >= 0 else -1
if rank == 0: fcntl.lockf(alive, fcntl.LOCK_EX); os.write(alive, b"x")
promoted = False
def look():
    global promoted
    if rank != 1 or promoted: return
    while not os.fstat(alive).st_size: pass
    try: fcntl.lockf(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: return
    promoted = True
    files.promote()
builtins.look = look
class Looks(ast.NodeTransformer):
    # look() before every statement, but for those that have to come first
    def generic_visit(self, node):
        super().generic_visit(node)
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, block, None), list) and not isinstance(node, ast.ClassDef):
                setattr(node, block, [each for one in statements for each in ast.parse("look()").body + [one]])
        return node
program = ast.fix_missing_locations(Looks().visit(ast.parse(Path(script).read_text())))
sys.argv = sys.argv[3:]
sys.path[0] = os.path.dirname(script)
if rank >= 0:
    from oars.adapt import files
    files.install(rank, rank == 0, shared)
exec(compile(program, script, "exec"), {"__name__": "__main__"})
while rank == 1 and not promoted: look()
"""


def _start(rank: int, folder: Path, script: Path, before: Sequence[str], **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(rank), str(script.parent / "shared"), str(script)]
    libraries = [*before, PATH] if rank >= 0 else before
    if libraries:
        command = [*preload(":".join(libraries)), *command]
    environ = environment(**{"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(script.parent), **env})
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class OneProcess:
    """What the script prints and writes under plain Python, and how long it takes."""

    def __init__(self, base: Path, body: str, before: Sequence[str] = (), limit: float = 60, **env: str) -> None:
        self.body, self.before, self.limit, self.env = textwrap.dedent(body), before, limit, env
        prepare(base / "w")
        (base / "script.py").write_text(self.body)
        begun = time.monotonic()
        process = _start(-1, base / "w", base / "script.py", before, DELAYS_UNDER=str(base), **env)
        self.output, errors = process.communicate(timeout=limit)
        assert process.returncode == 0, errors
        self.tree, self.seconds = tree(base / "w"), time.monotonic() - begun

    def survives(self, seed: int, base: Path) -> None:
        """Kill the voice of two ranks at a seeded moment: the survivor's lines and the files are one process's."""
        script, run = base / "script.py", base / "w"
        script.write_text(self.body)
        prepare(run)
        env = {**self.env, "DELAYS_SEED": str(seed), "DELAYS_UNDER": str(base)}
        voice, survivor = (_start(rank, run, script, self.before, **env) for rank in range(2))
        try:
            while not (base / "shared-alive").exists():
                time.sleep(0.01)
            time.sleep(random.Random(seed).uniform(0.2, 1.5 * self.seconds))
            voice.kill()
            output, errors = survivor.communicate(timeout=self.limit)
            assert survivor.returncode == 0, errors
            lines = difflib.unified_diff(self.output.splitlines(), output.splitlines(), "plain", "survivor", n=0)
            assert output == self.output, "\n".join([*lines, errors])
            there, wanted = tree(run), self.tree
            differ = sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name))
            assert not differ, [(name, there.get(name, "missing"), wanted.get(name, "too many")) for name in differ[:3]]
        finally:
            for process in (voice, survivor):
                process.kill()
                process.communicate()
