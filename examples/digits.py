"""Images of digits, 28 × 28: drawn here, or the real MNIST where its files are given.

Each image is a 5 × 7 glyph under a random shift, scale, rotation and slant, with noise on top. Ten thousand take about
a second, nothing is downloaded, and the same seed gives the same images.

    python examples/digits.py          # look at a few
"""

import gzip
from pathlib import Path

import numpy as np

GLYPHS = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .###.
"""


def glyphs():
    """The ten glyphs as 9 × 7 arrays of 0 and 1: a margin of one cell is left around each."""
    rows = [line.split() for line in GLYPHS.strip().splitlines()]
    out = np.zeros((10, 9, 7), np.float32)
    for y, row in enumerate(rows):
        for digit, cells in enumerate(row):
            out[digit, y + 1, 1:6] = [c == "#" for c in cells]
    return out


def draw(n, seed=0, size=28):
    """n images (float32, 0 to 1) and their classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    font = glyphs()
    images = np.empty((n, size, size), np.float32)
    # Where each pixel lies, from -1 to 1; an affine map then says which point of the glyph it shows.
    v, u = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size), indexing="ij")
    for begin in range(0, n, 1000):  # in parts, to stay within the cache
        label = labels[begin : begin + 1000]
        m = len(label)
        angle, slant = rng.normal(0, 0.14, m), rng.normal(0, 0.18, m)
        wide, tall = rng.uniform(0.45, 0.75, m), rng.uniform(0.6, 0.85, m)
        du, dv = rng.uniform(-0.25, 0.25, m), rng.uniform(-0.15, 0.15, m)
        cos, sin = np.cos(angle), np.sin(angle)

        def each(a):
            return a[:, None, None].astype(np.float32)

        p, q = u[None].astype(np.float32) - each(du), v[None].astype(np.float32) - each(dv)
        x = (each(cos) * p + each(sin) * q) / each(wide) + each(slant) * q
        y = (each(cos) * q - each(sin) * p) / each(tall)
        # From -1..1 to cells, then the four cells around the point, weighed by distance.
        x, y = np.clip((x + 1) * 2.5 + 0.5, 0, 5.999), np.clip((y + 1) * 3.5 + 0.5, 0, 7.999)
        i, j = y.astype(np.intp), x.astype(np.intp)
        fy, fx = y - i, x - j
        k = label[:, None, None]
        top = font[k, i, j] * (1 - fx) + font[k, i, j + 1] * fx
        low = font[k, i + 1, j] * (1 - fx) + font[k, i + 1, j + 1] * fx
        ink = top * (1 - fy) + low * fy
        noise = rng.standard_normal(ink.shape, np.float32) * 0.2
        images[begin : begin + 1000] = np.clip(1.4 * ink + noise, 0, 1)
    return images, labels.astype(np.int64)


def read_idx(folder, name):
    """One of MNIST's files, packed with gzip or not."""
    for path in (Path(folder) / name, Path(folder) / f"{name}.gz"):
        if path.exists():
            data = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
            dims = data[3]
            shape = [int.from_bytes(data[4 + 4 * d : 8 + 4 * d], "big") for d in range(dims)]
            return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)
    raise SystemExit(f"{folder} holds neither {name} nor {name}.gz; leave out --data to draw digits instead")


def load(folder=None, train=10_000, test=2_000, seed=0):
    """Training images and classes, test images and classes; from MNIST's files in `folder`, else drawn."""
    if folder is None:
        return *draw(train, seed), *draw(test, seed + 1)
    out = []
    for part, n in (("train", train), ("t10k", test)):
        out.append(read_idx(folder, f"{part}-images-idx3-ubyte")[:n].astype(np.float32) / 255)
        out.append(read_idx(folder, f"{part}-labels-idx1-ubyte")[:n].astype(np.int64))
    return tuple(out)


if __name__ == "__main__":
    images, labels = draw(6, seed=3)
    for image, label in zip(images, labels, strict=True):
        print(f"a {label}")
        print("\n".join("".join(" .:+#"[int(p * 4.99)] for p in row) for row in image[::2]))
