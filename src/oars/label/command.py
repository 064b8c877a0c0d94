"""The verb ``oars label``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import sys
import webbrowser
from pathlib import Path

from oars.arguments import Parser, count_of, number

EXAMPLES = """\
SOURCE is anything oars.data.open opens: an HDF5 or CXI file, a folder of images, shards, .npy, NetCDF.
Labels are kept in NAME.oars-label/ of the current folder; the same command goes on with them.

examples:
  oars label run.h5 --classes water,ice
  oars label photos/ --port 7007
  oars label run.h5 --live                  # while it is written: an HDF5 file (SWMR), or a folder
  oars label run.h5 --export                # writes run.labels.csv
  oars label run.h5 --simulate truth.csv    # what will it cost? a simulated labeller tells
"""
FIRST_PORT = 7070


def parser() -> Parser:
    """The arguments of ``oars label``."""
    top = Parser(prog="oars label", usage="oars label SOURCE [--classes A,B] [options]", epilog=EXAMPLES,
                 description="Open a page on which people label images in groups, with a model that learns as they do.",
                 allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("source", metavar="SOURCE", help="the images")
    top.add_argument("--classes", metavar="A,B", default="", help="classes to begin with; the page can make more")
    top.add_argument("--features", metavar="KIND", default="auto", help="what the model sees: radial, spots, "
                     "spots+radial, ssl (learnt from the images themselves), conv (an untrained network), a file of "
                     "your own (.npy, a row for each image), a function of your own (my.py:embed), or auto (default): "
                     "what separates the labels best")
    top.add_argument("--group", metavar="NAME", help="of an HDF5 file: the group that holds the images")
    top.add_argument("--live", action="store_true", help="follow the source as it grows")
    top.add_argument("--port", type=count_of("a port"), metavar="P", help="where to listen (default: the first free "
                     f"one from {FIRST_PORT} on)")
    top.add_argument("--seed", type=number, default=0, help="of the choice of images for the exam (default: 0)")
    top.add_argument("--export", action="store_true", help="write NAME.labels.csv and end")
    top.add_argument("--simulate", metavar="TRUTH.CSV", help="play a labeller who knows these labels (columns row and "
                     "label) and overlooks one wrong image in ten; nothing is kept")
    top.add_argument("--actions", type=count_of("actions"), default=1000, metavar="N", help="with --simulate: at most "
                     "so many clicks and keys (default: 1000)")
    top.add_argument("--host", help=argparse.SUPPRESS)
    return top


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    args = parser().parse_args(argv)
    for package, extra in (("starlette", "label"), ("uvicorn", "label"), ("torch", "label")):
        if importlib.util.find_spec(package) is None:
            print(f"oars: oars label needs {package}: pip install 'manyoars[{extra}]'", file=sys.stderr)
            return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small sums on many threads spend their time in waiting
    from oars.data.errors import DataError
    from oars.label.errors import LabelError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started ends with us
    try:
        return _do(args)
    except (LabelError, DataError) as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"oars: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _do(args: argparse.Namespace) -> int:
    from oars.label import features
    from oars.label.errors import LabelError
    from oars.label.folder import open_folder

    if args.host is not None:
        raise LabelError(f"--host {args.host}: the page is served to this machine only; from another one, use the "
                         "ssh -L line that oars label prints")
    features.check(args.features, args.live)
    if args.simulate is not None:
        from oars.label.simulate import simulate

        words = ["--seed", str(args.seed), *(["--group", args.group] if args.group else [])]
        return simulate(args.source, Path(args.simulate), args.actions, args.features, words, args.seed)
    names = [name.strip() for name in args.classes.split(",") if name.strip()]
    if args.live:
        from oars.label.live import wait

        wait(args.source, args.group)
    folder = open_folder(args.source, args.group, args.seed, args.live)
    lock = folder.lock()
    try:
        if args.export:
            return _export(folder)
        return _serve(args, folder, names)
    finally:
        os.close(lock)


def _export(folder: object) -> int:
    from oars.label import export
    from oars.label.desk import Desk
    from oars.label.folder import ENDING, Folder

    assert isinstance(folder, Folder)
    desk = Desk(folder, lambda what: None)
    target = Path(folder.path.name.removesuffix(ENDING) + ".labels.csv")
    export.write(desk, export.Keys(folder), target)
    labels = desk.state.labels()
    print(f"{target}: {int((labels >= 0).sum()):,} of {folder.rows:,} rows")
    desk.close()
    return 0


def _serve(args: argparse.Namespace, folder: object, names: list[str]) -> int:
    from oars.data import work
    from oars.label import features
    from oars.label.desk import SERVER, Actor
    from oars.label.folder import Folder
    from oars.label.server import serve
    from oars.label.serving import Serving

    assert isinstance(folder, Folder)
    if args.features.endswith(".npy"):
        features.read(args.features, folder.rows)
    listener = _listen(args.port)
    serving = Serving(folder, args.features, work.cores(), args.live)
    try:
        there = {serving.desk.state.names[n] for n in serving.desk.state.classes()}
        for name in names:
            if name not in there:
                serving.desk.add_class(Actor(SERVER), name)
        port = listener.getsockname()[1]
        address = f"http://127.0.0.1:{port}/#{folder.token()}"  # localhost may be ::1, where anybody may listen
        print(f"{folder.source}: {folder.rows:,} images; labels in {folder.path}\n"
              f"label at {address} (Ctrl-C ends it; what was done is saved)\n"
              f"from elsewhere: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address",
              flush=True)
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
            webbrowser.open(folder.opener(address).absolute().as_uri())
        with contextlib.suppress(KeyboardInterrupt):  # how it is ended; uvicorn has closed everything by then
            serve(serving, listener)
        serving.export()
    finally:
        serving.close()
        listener.close()
    return 0


def _listen(port: int | None) -> socket.socket:
    from oars.label.errors import LabelError

    for number_ in [port] if port is not None else range(FIRST_PORT, FIRST_PORT + 100):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio: no delay
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number_))
            listener.listen(128)
            return listener
        except (OSError, OverflowError):
            listener.close()
    raise LabelError(f"port {port} is taken: choose another --port" if port
                     else f"no free port from {FIRST_PORT} to {FIRST_PORT + 99}")
