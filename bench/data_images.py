"""Images per second: decoded, resized and cropped to 224, from our shards and from what others read.

    python bench/data_images.py                       # about 5 minutes on 2 cores
    python bench/data_images.py --images 300 --rounds 3
    python bench/data_images.py --pack --images 20000 # MB/s of `oars data pack` by number of workers, and its memory

The same images lie in shards, as loose files and in TFRecords. Each side takes its turn in fresh processes, one per
core, pinned; a round gives one ratio to the best of the others, and the table shows the median of the rounds with the
quarter below and above it. What else runs on the machine then weighs on all sides alike. Needs webdataset and
tensorflow (the extra `bench`).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIDE, SHORT = 224, 256  # the shorter side becomes 256, the middle 224 × 224 of that is kept
OURS = ("oars", "oars, random order")
OTHERS = ("webdataset", "Pillow, loose files", "tf.data")


# ---- the sides: each yields one array (224, 224, 3) after another ---------------------------------------------------

def ours(folder, part, parts, shuffled):
    import numpy as np

    import oars.data
    from oars.data.transforms import resized_center_crop

    data = oars.data.open(folder / "shards/train").transform(resized_center_crop(SIDE, SIDE / SHORT))
    order = np.random.default_rng(0).permutation(len(data)) if shuffled else np.arange(len(data))
    for batch in np.array_split(order[part::parts], -(-len(order) // 32)):  # as a loader asks for them
        for image, _ in data.__getitems__(batch):
            yield image


def with_pillow(image):
    """What loaders commonly do: decode, resize the whole, crop."""
    import numpy as np
    from PIL import Image

    image = image.convert("RGB")
    scale = SHORT / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    return np.asarray(image.crop((left, top, left + SIDE, top + SIDE)))


def webdataset(folder, part, parts):
    import webdataset as wds

    paths = sorted(map(str, (folder / "shards/train").glob("*.tar")))[part::parts]
    for sample in wds.WebDataset(paths, shardshuffle=False).decode("pil").to_tuple("jpg", "cls"):
        yield with_pillow(sample[0])


def loose(folder, part, parts):
    from PIL import Image

    for path in sorted((folder / "loose").glob("*/*.jpg"))[part::parts]:
        yield with_pillow(Image.open(path))


def tf_data(folder, part, parts):
    """The middle is cut out while decoding, then resized: faster than resizing the whole."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def load(record):
        data = tf.io.parse_single_example(record, {"image/encoded": tf.io.FixedLenFeature([], tf.string)})
        shape = tf.image.extract_jpeg_shape(data["image/encoded"])
        side = tf.cast(SIDE / SHORT * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32), tf.int32)
        window = tf.stack([(shape[0] - side) // 2, (shape[1] - side) // 2, side, side])
        pixels = tf.image.decode_and_crop_jpeg(data["image/encoded"], window, channels=3)
        return tf.cast(tf.image.resize(pixels, (SIDE, SIDE), "bilinear"), tf.uint8)

    files = sorted(map(str, (folder / "records").glob("*-of-*")))
    data = tf.data.TFRecordDataset(files).shard(parts, part).map(load, num_parallel_calls=1).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    yield from data.with_options(options).as_numpy_iterator()


SIDES = {"oars": lambda *a: ours(*a, False), "oars, random order": lambda *a: ours(*a, True), "webdataset": webdataset,
         "Pillow, loose files": loose, "tf.data": tf_data}


def one(folder, side, part, parts):
    """In a process of its own: the first images warm up, then the clock runs."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[part]})
    if side.startswith("oars"):
        import torch

        torch.set_num_threads(1)
    images = SIDES[side](folder, part, parts)
    for _ in range(10):
        next(images)
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    for image in images:
        assert image.shape == (SIDE, SIDE, 3)
        count += 1
    print(json.dumps([count, time.perf_counter() - began, time.process_time() - cpu]))


# ---- the rounds -----------------------------------------------------------------------------------------------------

def run(*words, **how):
    source = os.pathsep.join(p for p in (str(Path(__file__).resolve().parents[1] / "src"), os.environ.get("PYTHONPATH"))
                             if p)
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, *map(str, words)], env=env, stdout=subprocess.PIPE, text=True, **how)


def oars(*words):
    process = run("-m", "oars", "data", *words)
    if process.wait():
        sys.exit(f"oars data {' '.join(map(str, words))} failed")


def measure(folder, side, cores):
    """Images per second and core."""
    processes = [run(__file__, "--one", side, "--folder", folder, "--part", k, "--parts", cores,
                     stderr=subprocess.DEVNULL) for k in range(cores)]
    found = []
    for process in processes:
        text, _ = process.communicate(timeout=600)
        if process.returncode:
            sys.exit(f"{side} failed: is it installed? pip install 'manyoars[bench]'")
        found.append(json.loads(text.splitlines()[-1]))
    return (sum(count / wall for count, wall, _ in found) / cores,
            sum(count for count, _, _ in found) / sum(cpu for _, _, cpu in found))


def spread(ours, theirs):
    """The median ratio, with the quarter below and above it."""
    values = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def images(args, folder):
    oars("make", "imagenet-like", folder / "archive", "--size", args.images, "--side", 430)
    oars("pack", folder / "archive", folder / "shards", "--shard-mb", max(1, args.images // 100))
    oars("export", folder / "shards/train", folder / "loose", "--to", "folder")
    oars("export", folder / "shards/train", folder / "records", "--to", "tfrecord")
    for cores in range(1, min(2, len(os.sched_getaffinity(0))) + 1):
        rates = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side in SIDES:
                rates[side].append(measure(folder, side, cores))
        print(f"\n{cores} core{'s' * (cores > 1)}: images per second and core, by the clock (per second of CPU)")
        for side, found in rates.items():
            clock, cpu = (statistics.median(each) for each in zip(*found, strict=True))
            print(f"  {side:22s} {clock:7.0f} ({cpu:.0f})")
        for k, how in enumerate(("by the clock", "per second of CPU")):
            sequential, random, *others = ([r[k] for r in rates[side]] for side in (*OURS, *OTHERS))
            best = [max(each) for each in zip(*others, strict=True)]
            print(f"  {how}: {spread(sequential, best)} of the best other, random order "
                  f"{spread(random, sequential)} of sequential", flush=True)


def packing(args, folder):
    """MB/s by number of workers, in turns, from the start of the command to its end."""
    oars("make", "imagenet-like", folder / "archive", "--size", args.images, "--side", 430)
    size = sum(path.stat().st_size for path in (folder / "archive").iterdir())
    cores = len(os.sched_getaffinity(0))
    shard = max(1, size // (16 * cores) >> 20)  # a shard is one worker's task: with few of them workers would idle
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores] + [cores]
    took = {workers: [] for workers in counts}
    memory = dict.fromkeys(counts, 0)
    for _ in range(args.rounds):
        for workers in counts:
            out = folder / "out"
            began = time.perf_counter()
            process = run("-m", "oars", "data", "pack", folder / "archive", out, "--workers", workers, "--shard-mb",
                          shard)
            memory[workers] = max(memory[workers], most_memory(process))
            took[workers].append(time.perf_counter() - began)
            if process.returncode:
                sys.exit("oars data pack failed")
            shutil.rmtree(out)
    print(f"{args.images * 6 // 5:,} images, {size / 1e6:.0f} MB, shards of {shard} MB")
    for workers in counts:
        median = statistics.median(took[workers])
        print(f"pack, {workers} worker{'s' * (workers > 1)}: {median:.2f} s, {size / median / 1e6:.0f} MB/s, "
              f"{args.images * 1.2 / median:.0f} images/s, {statistics.median(took[1]) / median:.2f} times one worker; "
              f"a worker had {memory[workers]:.0f} MB at most", flush=True)


def most_memory(process):
    """Wait for a process; the most memory in MB that a child of it ever had."""
    most = 0
    while process.poll() is None:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                lines = Path(f"/proc/{child}/status").read_text().splitlines()
                most = max([most, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
        except OSError:
            pass  # it has just ended
        time.sleep(0.02)
    return most / 1024


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", type=int, default=1000)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--pack", action="store_true")
    for name in ("--one", "--folder", "--part", "--parts"):
        p.add_argument(name, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        return one(Path(args.folder), args.one, int(args.part), int(args.parts))
    with tempfile.TemporaryDirectory() as folder:
        (packing if args.pack else images)(args, Path(folder))


if __name__ == "__main__":
    main()
