"""Does the loader keep a GPU fed? Inception V3 from shards, against the same steps on one batch that lies on the GPU.

    python bench/feed.py shards                    # shards/train is made first if it is not there
    python bench/feed.py shards --workers 12 16    # each number of processes that decode, in turns
    python bench/feed.py small --shorter 342       # images that were made smaller before they were packed

What trains is examples/imagenet/train.py with `--bf16 --channels-last --compile`, at 299 × 299 and batch 256. The set
that is made is 8,000 images of 185,000 pixels and 110 kB on average, as ImageNet's are (500 × 375); it stays in the
page cache, so no disk is measured. Three parts: training, fed and synthetic in turns, which is left out without a GPU;
the loader alone, and how fast its processes hand over batches that cost nothing to make; what cores do with images, one
alone and all at once, which is the limit of any loader on them.
"""

import argparse
import io
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples/imagenet")]

import nets  # noqa: E402

import oars.data  # noqa: E402
from oars.data.decode import decode  # noqa: E402
from oars.data.shards import Reader  # noqa: E402
from oars.data.transforms import flip, random_resized_crop  # noqa: E402

CORES = sorted(os.sched_getaffinity(0))
CLASSES = 10
NOISE, QUALITY, SMALL_QUALITY = 16, 94, 90  # the first two give 4.9 bits per pixel, as ImageNet's mean


# ---- the set --------------------------------------------------------------------------------------------------------

def photograph(number, path, shorter):
    """One of `oars data make`'s images, with a grain that makes it as large a file as a photograph."""
    from PIL import Image

    from oars.data.make_images import draw

    pixels = np.asarray(Image.open(io.BytesIO(draw(0, False, number, number % CLASSES, 430).jpeg)), np.float32)
    grain = np.random.default_rng(number).standard_normal((*pixels.shape[:2], 1), np.float32)
    image = Image.fromarray(np.clip(pixels + NOISE * grain, 0, 255).astype(np.uint8))
    if shorter:
        scale = shorter / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    image.save(path, quality=SMALL_QUALITY if shorter else QUALITY)


def make(folder, count, shorter):
    """Pack `count` images into folder/train."""
    with tempfile.TemporaryDirectory() as loose:
        for k in range(CLASSES):
            os.mkdir(f"{loose}/{k}")
        began = time.perf_counter()
        with multiprocessing.get_context("fork").Pool(len(CORES)) as pool:
            pool.starmap(photograph, [(n, f"{loose}/{n % CLASSES}/{n}.jpg", shorter) for n in range(count)])
        print(f"made {count:,} images in {time.perf_counter() - began:.0f} s")
        subprocess.run([sys.executable, "-m", "oars", "data", "pack", loose, folder / "train", "--shard-mb", "16"],
                       env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=True)


def opened(folder, size):
    """The images as the example trains on them."""
    return oars.data.open(folder / "train").transform(random_resized_crop(size), flip())


# ---- cores ----------------------------------------------------------------------------------------------------------

WORK = {"read and check": lambda reader, data, rows: [len(reader.image(i)) for i in rows],
        "+ decode": lambda reader, data, rows: [len(decode(reader.image(i)[0])) for i in rows],  # no pixels are kept
        "+ cut, resize, flip": lambda reader, data, rows: data.__getitems__(rows),
        "+ make a batch": lambda reader, data, rows: default_collate(data.__getitems__(rows))}


def rate(folder, args, kind, core):
    """Images per second of one process, pinned to a core."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    reader, data, do = Reader(folder / "train"), opened(folder, args.size), WORK[kind]
    rows = itertools.cycle(np.random.default_rng(core).permutation(len(data)).tolist())
    do(reader, data, list(itertools.islice(rows, 64)))
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < args.seconds:
        do(reader, data, list(itertools.islice(rows, 64)))
        count += 64
    return count / (time.perf_counter() - began)


def cores(folder, args):
    """What one core does alone, and each of all cores at once."""
    print(f"\nimages per second and core     one core alone     each of {len(CORES)} at once     all together")
    for kind in WORK:
        found = []
        for some in (CORES[:1], CORES):
            with multiprocessing.get_context("fork").Pool(len(some)) as pool:
                found.append(pool.starmap(rate, [(folder, args, kind, core) for core in some], chunksize=1))
        alone, all_ = found[0][0], sum(found[1])
        print(f"  {kind:22s} {alone:9.0f} ({1000 / alone:.2f} ms) {all_ / len(CORES):9.0f} "
              f"({1000 * len(CORES) / all_:.2f} ms) {all_:15.0f}", flush=True)


# ---- the loader -----------------------------------------------------------------------------------------------------

class Ready:
    """Images that cost nothing to make: what is left is handing them over."""

    def __init__(self, size):
        self.image = np.zeros((size, size, 3), np.uint8)

    def __len__(self):
        return 1 << 20

    def __getitems__(self, rows):
        return [(self.image, 0)] * len(rows)


def loader_of(data, args, workers, batches):
    """As the example's, but it goes on from one pass to the next without an end."""
    return iter(DataLoader(data, args.batch, sampler=RandomSampler(data, num_samples=args.batch * batches),
                           num_workers=workers, pin_memory=torch.cuda.is_available()))


def alone(data, args, workers):
    """Images per second of a loader whose batches nobody uses."""
    warm = 2 * workers
    batches = loader_of(data, args, workers, 2 * warm + args.steps)
    for _ in range(warm):
        next(batches)
    began = time.perf_counter()
    for _ in range(args.steps):
        next(batches)
    return args.steps * args.batch / (time.perf_counter() - began)


# ---- training -------------------------------------------------------------------------------------------------------

class Training:
    """The example's training, of which `run` does some steps."""

    def __init__(self, folder, log):
        sys.argv = ["train.py", str(folder), "--bf16", "--channels-last", "--compile"]
        import train as example  # only here: with TensorBoard comes TensorFlow, where that is installed

        self.example = example
        self.args, self.device, self.log = example.arguments(), torch.device("cuda"), log
        torch.backends.cudnn.benchmark = True
        self.model = nets.build(self.args.model, 1000, self.args.width, self.args.size).to(self.device)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.average = example.copy.deepcopy(self.model)
        self.optimizer = example.optimizer_of(self.args, self.model)
        self.schedule = example.schedule_of(self.args, self.optimizer, 5000)
        self.compiled = torch.compile(self.model)
        pixels = torch.randint(0, 256, (self.args.batch, self.args.size, self.args.size, 3), dtype=torch.uint8)
        self.batch = pixels.to(self.device), torch.randint(0, 1000, (self.args.batch,)).to(self.device)

    def run(self, batches, steps):
        """Images per second, and how long each step waited for its batch."""
        waits = []

        def timed():
            for _ in range(steps):
                began = time.perf_counter()
                batch = next(batches)
                waits.append(time.perf_counter() - began)
                yield batch

        _, speed, _ = self.example.train(0, self.compiled, self.average, timed(), self.optimizer, self.schedule,
                                         self.args, self.device, self.log)
        return speed, waits


def training(folder, args):
    """Fed and synthetic in turns."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as logs, SummaryWriter(logs) as log:
        began = time.perf_counter()
        it = Training(folder, log)
        it.run(itertools.repeat(it.batch), 10)
        print(f"\ncompiled in {time.perf_counter() - began:.0f} s")
        ratios = {workers: [] for workers in args.workers}
        for _ in range(args.rounds):
            limit, _ = it.run(itertools.repeat(it.batch), args.steps)
            print(f"synthetic: {limit:.0f} images/s, {1000 * args.batch / limit:.1f} ms a step", flush=True)
            for workers in args.workers:
                batches = loader_of(opened(folder, args.size), args, workers, 4 * workers + args.steps)
                it.run(batches, 2 * workers)  # until what was fetched beforehand is used up
                speed, waits = it.run(batches, args.steps)
                del batches
                late, took = sum(wait > 0.001 for wait in waits) / len(waits), args.batch * args.steps / speed
                ratios[workers].append(speed / limit)
                print(f"{workers} workers: {speed:.0f} images/s, {speed / limit:.3f} of synthetic; {late:.0%} of the "
                      f"steps waited, {sum(waits) / took:.1%} of the time; without that a step took "
                      f"{1000 * (took - sum(waits)) / args.steps:.1f} ms", flush=True)
    for workers, found in ratios.items():
        print(f"{workers} workers: {statistics.median(found):.3f} of synthetic ({min(found):.3f} to {max(found):.3f})")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="with train in it, as `oars data pack` makes it; made if it is not there")
    p.add_argument("--images", type=int, default=8000, help="to make (default: 8000)")
    p.add_argument("--shorter", type=int, metavar="PIXELS", help="make the shorter side so long, at quality 90")
    p.add_argument("--workers", type=int, nargs="+", default=[len(CORES)], help="processes (default: one per core)")
    p.add_argument("--steps", type=int, default=128, help="to time (default: 128)")
    p.add_argument("--rounds", type=int, default=3, help="of training (default: 3)")
    p.add_argument("--seconds", type=float, default=3, help="for each figure of the cores (default: 3)")
    p.add_argument("--size", type=int, default=299, help=argparse.SUPPRESS)
    p.add_argument("--batch", type=int, default=256, help=argparse.SUPPRESS)
    args = p.parse_args()
    if not (args.folder / "train").exists():
        make(args.folder, args.images, args.shorter)
    reader = Reader(args.folder / "train")
    print(f"{len(reader):,} images of {reader.index['image_size'].mean() / 1e3:.0f} kB, {len(CORES)} cores, "
          f"torch {torch.__version__}", flush=True)
    if torch.cuda.is_available():
        training(args.folder, args)
    for workers in args.workers:
        made, handed = (alone(data, args, workers) for data in (opened(args.folder, args.size), Ready(args.size)))
        print(f"the loader alone, {workers} workers: {made:.0f} images/s; handing over batches that cost nothing to "
              f"make: {handed:.0f} images/s", flush=True)
    cores(args.folder, args)


if __name__ == "__main__":
    main()
