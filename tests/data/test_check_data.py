"""`oars data check`, `show`, `stats` and `export` on packed images, sound and damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
import torch
from packing import data
from PIL import Image
from running import environment

import oars.data as oars_data
from oars.data import shards, tfrecord
from oars.data.decode import centre, decode, resize
from oars.data.make_images import draw, imagenet_like
from oars.data.pack import pack
from oars.data.shards import Reader
from oars.data.transforms import resized_center_crop


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("check")
    imagenet_like(root / "a", 120, 4, 100, "", 2, 2)
    assert pack(root / "a", root / "out", shard_bytes=200_000) == 0
    return root / "out"


def test_a_sound_folder_is_well(packed):
    done = data("check", packed)
    assert done.stdout.count("all is well") == 2 and "120 images in" in done.stdout and "note" not in done.stdout


@pytest.mark.parametrize(("what", "says"), [
    ("byte", "SHA-256 differs"), ("cut", "bytes, not"), ("gone", "is missing"), ("header", "no valid header")])
def test_damage_to_a_shard_is_found(packed, tmp_path, what, says):
    copy = tmp_path / "copy"
    shutil.copytree(packed / "train", copy)
    path = copy / "shard-000001.tar"
    shard = bytearray(path.read_bytes())
    if what == "byte":
        shard[600] ^= 1
    elif what == "cut":
        del shard[-3000:]
    elif what == "header":
        shard[10] ^= 1
    path.write_bytes(shard)
    if what == "gone":
        path.unlink()
    done = data("check", copy, code=1)
    assert says in done.stdout and "shard-000001.tar" in done.stdout


def test_wrong_labels_and_a_sorted_order_are_told(packed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(packed / "train", copy)
    facts, index = shards.read_manifest(copy), np.load(copy / "index.npy")
    index = index[np.argsort(index["label"], kind="stable")]
    index["label"][:3] = 1
    np.save(copy / "index.npy", index)
    facts["index"] = zlib.crc32(index.tobytes())
    (copy / "manifest.json").write_bytes(shards.encode_manifest(facts))
    done = data("check", copy, code=1)
    assert "but its label 1 means" in done.stdout and "sorted by class" in done.stdout


def test_the_sheet_is_a_picture_of_the_samples(packed, tmp_path):
    data("show", packed / "train", "-n", 7, "--to", tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.format == "PNG" and sheet.size == (600, 3 * 218)
    yellow = (np.abs(np.asarray(sheet).astype(int) - [255, 230, 0]).sum(2) < 30).sum()
    assert yellow > 500  # boxes
    assert "name one of them" in data("show", packed, code=2).stderr


def test_stats_are_those_of_the_pixels(packed):
    reader = Reader(packed / "val")
    images = [decode(reader.image(i)[0]) / 255 for i in range(len(reader))]
    mean = np.mean([image.mean((0, 1)) for image in images], 0)
    std = np.sqrt(np.mean([(image ** 2).mean((0, 1)) for image in images], 0) - mean ** 2)
    text = data("stats", packed / "val").stdout
    found = [[float(v) for v in line.split(maxsplit=1)[1].split(",")] for line in text.splitlines()[1:]]
    assert np.allclose(found, [mean, std], atol=1e-4)


def test_exports_hold_the_same_samples(packed, tmp_path):
    reader = Reader(packed / "train")
    for to in ("tfrecord", "hdf5", "folder"):
        data("export", packed / "train", tmp_path / to, "--to", to, "--side", 32)
        assert "there already" in data("export", packed / "train", tmp_path / to, "--to", to, code=2).stderr
    records = tfrecord.Reader(tmp_path / "tfrecord")
    files = list((tmp_path / "folder").glob("*/*.jpg"))
    with h5py.File(tmp_path / "hdf5") as file:
        assert len(records) == len(files) == len(reader) == len(file["images"])
        for i in range(0, len(reader), 7):
            sample = reader.sample(i)
            record = records.sample(i)
            assert record["image"] == sample["image"] and record["label"] == sample["label"]
            assert np.array_equal(record["boxes"], sample["boxes"])
            assert np.array_equal(file["images"][i], centre(sample["image"], 32))
            assert file["labels"][i] == sample["label"]
            assert (tmp_path / "folder" / sample["class"] / f"{i:08d}.jpg").read_bytes() == sample["image"]


def test_decoders_agree(packed):
    """With and without libjpeg-turbo's own interface and PyTorch: the same picture, but for rounding."""
    script = ("import sys, json; sys.modules['simplejpeg'] = sys.modules['torch'] = None\n"
              "from oars.data import decode, shards; r = shards.Reader(sys.argv[1])\n"
              "print(json.dumps([[int(v) for v in decode.centre(r.image(i)[0], 48).ravel()] for i in range(5)]))")
    other = json.loads(subprocess.run([sys.executable, "-c", script, packed / "train"], env=environment(), check=True,
                                      capture_output=True, text=True).stdout)
    reader = Reader(packed / "train")
    for i in range(5):
        ours = centre(reader.image(i)[0], 48).ravel().astype(int)
        assert np.abs(ours - other[i]).mean() < 2.5 and np.abs(ours - other[i]).max() < 60


@pytest.mark.parametrize("box", [(0, 0, 90, 70), (11, 5, 81, 66), (20, 20, 35, 40)])
def test_resized_pixels_lie_in_memory_as_a_batch_wants_them(box):
    """Colours last, as they are decoded: if not, putting them into a batch takes as long as resizing."""
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    left, top, right, bottom = box
    planes = torch.from_numpy(pixels[top:bottom, left:right].transpose(2, 0, 1).copy())[None]
    same = torch.nn.functional.interpolate(planes, (30, 20), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    small = resize(pixels, box, (30, 20))
    assert small.flags.c_contiguous and np.array_equal(small, same.numpy())


def test_what_opens_anything_opens_shards(packed):
    data, reader = oars_data.open(packed / "train"), Reader(packed / "train")
    small = data.transform(resized_center_crop(40))
    assert len(data) == len(reader) and data.classes == reader.classes
    for i in (0, 7, len(reader) - 1):
        jpeg, label = reader.image(i)
        pixels, found = data[i]
        assert found == label and np.array_equal(pixels, decode(jpeg))
        assert np.array_equal(small[i][0], centre(jpeg, 40))


def test_large_images_are_decoded_smaller_and_look_the_same():
    data = draw(0, False, 0, 1, 900).jpeg
    full, small = decode(data), decode(data, 200)
    assert small.shape[0] == -(-full.shape[0] // 2) or small.shape[0] == -(-full.shape[0] // 4)
    assert min(small.shape[:2]) >= 200
    wide = np.asarray(Image.fromarray(full).resize(small.shape[1::-1], Image.Resampling.BOX)).astype(int)
    assert np.abs(wide - small).mean() < 3
