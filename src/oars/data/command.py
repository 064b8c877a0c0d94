"""``oars data VERB``: the verbs and their arguments; each verb's work is in a file of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from oars.arguments import Parser, count_of
from oars.data.errors import DataError
from oars.data.needs import need

TOP = """\
examples:
  oars data make imagenet-like archive --size 2000    # a stand-in for ImageNet, in the layout of the real archives
  oars data pack archive shards                       # into tar shards: shards/train, shards/val
  oars data check shards/train
  oars data show shards/train -n 25                   # a contact sheet, with boxes
"""
PACK = """\
SRC is one of
  a folder with ImageNet's archives (ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, and what is there of
    Annotation.tar.gz, ILSVRC2012_bbox_*, imagenet_2012_validation_synset_labels.txt); OUT/train and OUT/val are made
  a tar file of images in a folder, or in a tar file, per class
  a folder of such folders
  a CSV file with columns path and label, and xmin, ymin, xmax, ymax (pixels) if there are boxes

Interrupted, by whatever? Run the same command again: finished shards are not made again.
Exit code 1: an archive is damaged, and images may be missing.

examples:
  oars data pack imagenet shards
  oars data pack photos.tar shards --workers 8
"""
CHECK = """\
exit code 1: something is wrong.

example:
  oars data check shards/train
"""
MAKE = """\
kinds:
  imagenet-like  ILSVRC2012_img_train.tar and _val.tar, Annotation.tar.gz, the validation boxes and classes
  digits         MNIST's four IDX files
  higgs-like     HIGGS.csv.gz: label, 21 low-level and 7 high-level features of collision events
  water-ice      water-ice.h5: diffraction images, diffuse rings of water against Bragg spots of ice; truth.csv

examples:
  oars data make imagenet-like archive --size 2000 --classes 10 --damage all
  oars data make higgs-like higgs --size 100000
"""


def parser() -> Parser:
    """All verbs of ``oars data``."""
    top = Parser(prog="oars data", description="Pack archives of images into shards, and inspect them.",
                 epilog=TOP, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    def verb(name: str, text: str, epilog: str) -> Parser:
        return verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog,
                                allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    pack = verb("pack", "pack images into tar shards with an index", PACK)
    pack.add_argument("source", metavar="SRC", type=Path)
    pack.add_argument("out", metavar="OUT", type=Path)
    pack.add_argument("--boxes", metavar="ARCHIVE", type=Path, help="bounding boxes: an archive or folder of XML files")
    pack.add_argument("--labels", metavar="FILE", type=Path,
                      help="labels for class names: another pack's labels.json, or a name per line (default: 0, 1, ... "
                      "in the order of the sorted names)")
    pack.add_argument("--seed", type=int, default=0, help="seed of the order of the images (default: 0)")
    pack.add_argument("--shard-mb", type=count_of("megabytes"), default=256, metavar="MB",
                      help="approximate size of a shard (default: 256)")
    _workers(pack)

    check = verb("check", "verify counts, checksums, images, labels, balance and order", CHECK)
    check.add_argument("out", metavar="OUT", type=Path)
    _workers(check)

    show = verb("show", "draw a contact sheet with labels and boxes", "example:\n  oars data show shards/train -n 25\n")
    show.add_argument("out", metavar="OUT", type=Path)
    show.add_argument("-n", dest="count", type=count_of("images"), default=25, metavar="N", help="images (default: 25)")
    show.add_argument("--to", type=Path, default=Path("contact-sheet.png"), metavar="FILE",
                      help="where to write it (default: contact-sheet.png)")
    show.add_argument("--seed", type=int, default=0, help="seed of the choice of images (default: 0)")

    stats = verb("stats", "mean and standard deviation of each channel", "example:\n  oars data stats shards/train\n")
    stats.add_argument("out", metavar="OUT", type=Path)
    stats.add_argument("-n", dest="count", type=count_of("images"), default=10_000, metavar="N",
                       help="number of images, evenly from the whole set (default: 10000)")
    _workers(stats)

    export = verb("export", "write shards in another format",
                  "example:\n  oars data export shards/train records --to tfrecord\n")
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument("target", metavar="TARGET", type=Path)
    export.add_argument("--to", choices=("tfrecord", "hdf5", "folder"), required=True,
                        help="tfrecord: as TensorFlow's Inception scripts wrote them; hdf5: one file, images of "
                        "--side; folder: a folder of JPEG files per class")
    export.add_argument("--side", type=count_of("pixels"), default=224, help="with --to hdf5 (default: 224)")
    _workers(export)

    make = verb("make", "make a stand-in for a known data set", MAKE)
    make.add_argument("kind", metavar="KIND", choices=("imagenet-like", "digits", "higgs-like", "water-ice"))
    make.add_argument("out", metavar="DIR", type=Path)
    make.add_argument("--size", type=count_of("samples"), default=1000, help="training samples (default: 1000)")
    make.add_argument("--classes", type=count_of("classes"), default=10, help="of imagenet-like (default: 10)")
    make.add_argument("--side", type=count_of("pixels"), default=400,
                      help="typical length of imagenet-like's images (default: 400)")
    make.add_argument("--damage", metavar="KINDS", default="",
                      help="spoil some of imagenet-like: all, or kinds separated by commas; damage.json tells which")
    make.add_argument("--hard", action="store_true", help="water-ice: four unbalanced classes, faint spots")
    make.add_argument("--stream", type=_rate, metavar="RATE", help="water-ice: append RATE images a second to the "
                      "file, as an experiment does")
    make.add_argument("--drift", action="store_true", help="with --stream: after half of the images the last class "
                      "becomes three times as frequent")
    make.add_argument("--seed", type=int, default=0)
    _workers(make)
    return top


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no rate: images a second, above 0")
    return rate


def _workers(verb: Parser) -> None:
    verb.add_argument("--workers", type=count_of("workers"), metavar="N", help="processes (default: one per core)")


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        return _do(args)
    except DataError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; run the same command again to go on" if args.verb == "pack" else ""
        print(f"\noars: stopped{again}", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is None:
            raise
        print(f"oars: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _end(*_: Any) -> None:
    raise KeyboardInterrupt


def _do(args: argparse.Namespace) -> int:
    workers = getattr(args, "workers", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers are the parallelism
    if args.verb == "show" or (args.verb == "make" and args.kind in ("imagenet-like", "digits")):
        need("PIL.Image", f"oars data {args.verb}")
    if args.verb == "pack":
        from oars.data.pack import pack

        return pack(args.source, args.out, args.boxes, args.labels, workers, args.seed, args.shard_mb << 20)
    if args.verb == "check":
        from oars.data.check import check

        return check(args.out, workers)
    if args.verb == "stats":
        from oars.data.check import stats

        return stats(args.out, args.count, workers)
    if args.verb == "show":
        from oars.data.show import show

        return show(args.out, args.count, args.to, args.seed)
    if args.verb == "export":
        from oars.data.export import export

        return export(args.out, args.target, args.to, args.side, workers)
    from oars.data.make import make

    return make(args.kind, args.out, args.size, args.classes, args.side, args.damage, args.seed, workers,
                args.hard, args.stream, args.drift)
