"""``--stage-env``: what ranks import goes to each host's own disk once, and ranks start from there.

Thousands of ranks that each read thousands of small Python files bring a shared file system to its knees. So before the
ranks start, one process per host meets in an MPI job of its own: the first packs the environment (the venv or conda
prefix, the Python below a venv, the script's folder, and oars where it lies elsewhere) into one stream, MPI broadcasts
it, and every host unpacks it into a folder of its own. Only these few processes start from the shared file system.

Ranks then run the copy of Python in that folder, with the copies first on ``sys.path``. The script itself, its working
folder and its data stay where they are; large files beside the script are links. The supervisor removes the folder on
its own host, and the deputies on theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from oars import runfolder
from oars.adapt.files import library
from oars.plan import Plan
from oars.runfolder import RUNS

if TYPE_CHECKING:
    import tarfile

LARGE = 1 << 20  # bytes: from here on a file beside the script stays where it is
CLEARED_WITHIN = 20.0  # seconds, for a copy to be removed
CHUNK = 8 << 20
PYTHON = "python"  # in the copy: the library of the Python below a venv, and nothing else of its libraries
NEVER = {"test", "tests", "idlelib", "turtledemo", "ensurepip", "site-packages"}  # of the Python below a venv


def wanted(name: str) -> bool:
    return not name.startswith(".") and name not in (RUNS, "__pycache__")


def send(place: str, roots: dict[str, str]) -> None:
    """On every host, started by ``_broadcast``: unpack what the first packs. The files of all of them are real."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    first_here = ranks.Split_type(MPI.COMM_TYPE_SHARED).rank == 0
    again = [sys.executable, os.path.abspath(__file__)]
    words = [f"{name}={path}" for name, path in roots.items()]
    with library.plain():
        packing = subprocess.Popen([*again, "pack", *words], stdout=subprocess.PIPE) if ranks.rank == 0 else None
        unpacking = subprocess.Popen([*again, "unpack", place] if first_here else ["cat"], stdin=subprocess.PIPE,
                                     stdout=subprocess.DEVNULL)
    assert unpacking.stdin is not None
    buffer, total = bytearray(CHUNK), 0
    stream: Any = packing.stdout if packing is not None else None
    while True:
        size = ranks.bcast(stream.readinto(buffer) if stream is not None else 0)
        if not size:
            break
        total += size
        ranks.Bcast([buffer, size, MPI.BYTE])
        unpacking.stdin.write(memoryview(buffer)[:size])
    unpacking.stdin.close()
    good = unpacking.wait() == 0 and (packing is None or packing.wait() == 0)
    if not ranks.allreduce(good, MPI.LAND):
        with library.plain():
            subprocess.run(["rm", "-rf", place])
        sys.exit(1)
    print(total)


def pack(out: IO[bytes], roots: dict[str, str]) -> int:
    """Everything, as one stream; how many bytes."""
    import tarfile

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for name, path in roots.items():
            choose = {"base": _of_base, "code": _of_code(path)}.get(name)
            tar.add(path, name, filter=choose)
        return tar.offset


def _of_base(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The interpreter, its libraries and its standard library."""
    parts = info.name.split("/")[1:]
    if parts[:1] not in ([], ["bin"], ["lib"]) or parts[:1] == ["bin"] and len(parts) > 1 and "python" not in parts[1]:
        return None
    if parts[:1] == ["lib"] and len(parts) > 1 and "python" not in parts[1] and ".so" not in parts[1]:
        return None
    return None if len(parts) == 3 and (parts[2] in NEVER or parts[2].startswith("config-")) else info


def _of_code(root: str) -> Any:
    """The script's folder; what is large, and what no module is, is a link to where it was."""
    def choose(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inside = info.name.partition("/")[2]
        path = os.path.join(root, inside)
        if (inside and not wanted(os.path.basename(inside))) or os.path.exists(os.path.join(path, "pyvenv.cfg")):
            return None
        if info.isreg() and info.size > LARGE:
            info.type, info.size, info.linkname = b"2", 0, path  # a symbolic link
        return info

    return choose


def unpack(stream: IO[bytes], place: str) -> None:
    """Here, for this user alone."""
    import tarfile

    os.makedirs(place, 0o700)
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        if hasattr(tarfile, "fully_trusted_filter"):  # it is our own
            tar.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
        tar.extractall(place)
    base, home = os.path.join(place, "base"), os.path.join(place, "env")
    if os.path.isdir(base):  # a venv says where the Python below it is
        config = Path(home, "pyvenv.cfg")
        text = "\n".join(f"home = {base}/bin" if line.startswith("home") else line
                         for line in config.read_text().splitlines())
        config.write_text(text + "\n")
        for link in Path(home, "bin").iterdir():
            if link.is_symlink() and os.path.isabs(target := os.readlink(link)):
                link.unlink()
                link.symlink_to(os.path.join(base, "bin", os.path.basename(target)))
        os.mkdir(os.path.join(place, PYTHON))  # its library is found by a full path else
        for library in Path(base, "lib").glob("libpython*.so*"):
            Path(place, PYTHON, library.name).symlink_to(library)


def staged(plan: Plan, path: str) -> str:
    """Where a path is for the ranks: in their host's copy if that has it."""
    if plan.stage is not None:
        for name, root in sorted(plan.stage["roots"].items(), key=lambda item: -len(item[1])):
            if path == root or path.startswith(root + os.sep):
                return os.path.join(plan.stage["place"], name) + path[len(root):]
    return path


def environment(plan: Plan, env: dict[str, str]) -> None:
    """Let the ranks' environment lead to the copy."""
    if plan.stage is None:
        return
    if "oars" in plan.stage["roots"]:  # before what a .pth file of the environment says
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [plan.stage["roots"]["oars"], env.get("PYTHONPATH")]))
    if "base" in plan.stage["roots"]:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [os.path.join(plan.stage["place"], PYTHON),
                                                               env.get("LD_LIBRARY_PATH")]))
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        if env.get(name):
            env[name] = os.pathsep.join(staged(plan, path) for path in env[name].split(os.pathsep))
    if "VIRTUAL_ENV" in env:
        env["VIRTUAL_ENV"] = staged(plan, env["VIRTUAL_ENV"])


def clear(plan: Plan) -> None:
    """Remove this host's copy."""
    if plan.stage is not None:
        shutil.rmtree(plan.stage["place"], ignore_errors=True)


def mark(plan: Plan, folder: Path, host: str) -> Path:
    """The mark of another host that has a copy; it goes with the copy."""
    path = folder / runfolder.staged(host)
    if plan.stage is not None:
        path.touch()
    return path


def wait_for_others(folder: Path) -> None:
    """Until the other hosts' copies are gone: when the command has ended a scheduler may end all that is left there."""
    until = time.monotonic() + CLEARED_WITHIN
    while time.monotonic() < until:
        with_copies = {path.name.removeprefix(runfolder.staged("")) for path in folder.glob(runfolder.staged("*"))}
        if all((folder / runfolder.gone(host)).exists() or (folder / runfolder.dark(host)).exists()
               for host in with_copies):
            return
        time.sleep(0.05)


def main() -> None:
    verb, *words = sys.argv[1:]
    roots = dict(word.split("=", 1) for word in words if "=" in word)
    if verb == "pack":
        pack(sys.stdout.buffer, roots)
    elif verb == "unpack":
        unpack(sys.stdin.buffer, words[0])
    else:
        send(words[0], roots)


if __name__ == "__main__":
    main()
