"""`oars data pack`: nothing dies, nothing is lost unsaid, boxes stay with their image, bytes are the same each time."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from packing import data, tree
from PIL import Image
from running import environment

from oars.data import boxes
from oars.data.examine import Unfit, examine
from oars.data.make_images import DAMAGE, draw
from oars.data.shards import Reader, read_manifest


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """An archive with every kind of damage, and what pack makes of it."""
    root = tmp_path_factory.mktemp("damaged")
    data("make", "imagenet-like", root / "a", "--size", 200, "--side", 90, "--damage", "all", "--seed", 3)
    done = data("pack", root / "a", root / "out", "--workers", 2, "--shard-mb", 1, code=1)
    return root, done.stdout


def test_the_same_bytes_for_one_two_and_three_workers(damaged, tmp_path):
    root, _ = damaged
    want = tree(root / "out")
    for workers in (1, 3):
        data("pack", root / "a", tmp_path / str(workers), "--workers", workers, "--shard-mb", 1, code=1)
        assert tree(tmp_path / str(workers)) == want
    assert want != {} and not any(name.endswith("tmp") or ".work" in name for name in want)


def outcome(root: Path) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """By file name: the samples that were packed, and what stands in quarantine."""
    reader = Reader(root / "out" / "train")
    packed = {os.path.basename(s["name"]): s for s in (reader.sample(i) for i in range(len(reader)))}
    left: dict[str, list[dict]] = {}
    for line in (root / "out" / "train" / "quarantine" / "reasons.jsonl").read_text().splitlines():
        entry = json.loads(line)
        left.setdefault(os.path.basename(entry["name"]), []).append(entry)
    return packed, left


CONVERTED = {"png": "PNG made a JPEG", "gif": "GIF made a JPEG", "cmyk": "CMYK made RGB", "16-bit": "16 bits made 8",
             "exif": "turned as EXIF says"}
LEFT_OUT = {"truncated": "truncated", "empty": "empty", "no-image": "no image", "bomb": "too large",
            "duplicate": "duplicate", "dotdot": "refused member",
            "absolute": "refused member", "link": "refused member", "device": "refused member"}
BOXES = {"box-range": "box clipped to its image", "box-order": "box with min > max", "bad-xml": "bad annotation",
         "entity-xml": "bad annotation"}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_put_right_or_told(damaged, kind):
    root, report = damaged
    packed, left = outcome(root)
    names = json.loads((root / "a" / "damage.json").read_text())[kind]
    assert names
    for name in map(os.path.basename, names):
        if kind in CONVERTED:
            assert CONVERTED[kind] in packed[name]["changes"] and name not in left
            image = Image.open(io.BytesIO(packed[name]["image"]))
            assert (image.format, image.mode) == ("JPEG", "RGB") and image.getexif().get(0x0112, 1) == 1
            assert CONVERTED[kind] in report
        elif kind in LEFT_OUT:
            assert name not in packed
            assert [entry["kind"] for entry in left[name]] == [LEFT_OUT[kind]] and left[name][0]["reason"]
            assert LEFT_OUT[kind] in report
        elif kind == "duplicate-other-class":  # the first in the archive stays, whichever that is
            assert "duplicate of another class" in report
        elif kind == "cut-archive":
            assert left[name][0]["kind"] == "damaged archive" and "cut off" in left[name][0]["reason"]
        else:
            entries = left[name] if kind.startswith("box") else left[name.replace(".JPEG", ".xml")]
            assert entries[0]["kind"] == BOXES[kind] and name in packed
            assert all(0 <= v <= 1 for box in packed[name]["boxes"] for v in box)


def test_everything_else_is_packed_and_every_image_is_accounted_for(damaged):
    root, report = damaged
    packed, left = outcome(root)
    facts = read_manifest(root / "out" / "train")
    with tarfile.open(root / "a" / "ILSVRC2012_img_train.tar") as outer:
        inner = [m.name for m in outer]
    assert len(inner) == 10
    gone = sum(1 for entries in left.values() for e in entries
               if e["kind"] in (*LEFT_OUT.values(), "duplicate of another class") and e["kind"] != "refused member")
    assert facts["samples"] == len(packed) == facts["listed"] - gone
    assert f"{facts['samples']:,} of {facts['listed']:,} images" in report
    assert 0 < 200 - facts["listed"] - 4 <= 20 * 0.1 + 1 + 200 * 0.02  # four refused; a tenth of one class was cut off


def test_images_keep_their_own_class_bytes_and_boxes(damaged):
    root, _ = damaged
    spoilt = {os.path.basename(n) for names in json.loads((root / "a" / "damage.json").read_text()).values()
              for n in names}
    reader = Reader(root / "out" / "train")
    seen = with_boxes = 0
    for i in range(len(reader)):
        sample = reader.sample(i)
        base = os.path.basename(sample["name"])
        if base in spoilt:
            continue
        number = (int(base.split("_")[1].split(".")[0]) - 10) // 37
        picture = draw(3, False, number, number % 10, 90)
        assert sample["image"] == picture.jpeg and sample["label"] == number % 10
        if number % 3:  # those have annotations
            want = np.array(picture.boxes) / np.array([picture.width, picture.height] * 2)
            assert np.allclose(sample["boxes"], want, atol=1e-5)
            with_boxes += 1
        else:
            assert len(sample["boxes"]) == 0
        seen += 1
    assert seen > 150 and with_boxes > 90


def test_every_validation_image_is_paired_with_its_own_boxes_and_class(damaged):
    root, _ = damaged
    reader = Reader(root / "out" / "val")
    classes = (root / "a" / "imagenet_2012_validation_synset_labels.txt").read_text().split()
    assert len(reader) == len(classes) == 40
    for i in range(len(reader)):
        sample = reader.sample(i)
        number = int(sample["name"][-13:-5]) - 1
        picture = draw(3, True, number, sample["label"], 90)
        assert sample["class"] == classes[number] and sample["image"] == picture.jpeg
        assert np.allclose(sample["boxes"], np.array(picture.boxes) / np.array([picture.width, picture.height] * 2),
                           atol=1e-5)


def test_validation_classes_come_from_the_boxes_where_there_is_no_list(damaged, tmp_path):
    root, _ = damaged
    for name in ("ILSVRC2012_img_val.tar", "ILSVRC2012_bbox_val_v3.tgz"):
        shutil.copy(root / "a" / name, tmp_path / name)
    data("pack", tmp_path, tmp_path.with_name("out-val"))
    assert tree(tmp_path.with_name("out-val") / "val")["index.npy"] == tree(root / "out" / "val")["index.npy"]
    os.unlink(tmp_path / "ILSVRC2012_bbox_val_v3.tgz")
    done = data("pack", tmp_path, tmp_path.with_name("nowhere"), code=2)
    assert "has no class" in done.stderr and done.stderr.count("\n") == 1
    assert not tmp_path.with_name("nowhere").exists()


def test_the_order_is_not_sorted_by_class(damaged):
    labels = np.asarray(Reader(damaged[0] / "out" / "train").labels)
    assert (labels[1:] == labels[:-1]).mean() < 0.2
    assert read_manifest(damaged[0] / "out" / "train")["plan"]["seed"] == 0


# ---- other sources --------------------------------------------------------------------------------------------------

def some_images(folder: Path, count: int = 6) -> dict[str, bytes]:
    out = {}
    for n in range(count):
        path = folder / f"{'cat' if n % 2 else 'dog'}" / f"{n // 2}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        out[str(path.relative_to(folder))] = draw(1, False, n, n % 2, 60).jpeg
        path.write_bytes(out[str(path.relative_to(folder))])
    return out


def contents(out: Path) -> dict[str, bytes]:
    reader = Reader(out)
    return {s["name"]: s["image"] for s in (reader.sample(i) for i in range(len(reader)))}


def test_a_folder_a_tar_a_compressed_tar_and_a_list_give_the_same_images(tmp_path):
    want = some_images(tmp_path / "src")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in sorted(want):
            archive.add(tmp_path / "src" / name, name)
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    rows = [f"{name},{name.split('/')[0]},5,6,20,30\n" for name in sorted(want)]
    (tmp_path / "src" / "list.csv").write_text("path,label,xmin,ymin,xmax,ymax\n" + "".join(rows) + rows[0])
    for source in ("src", "a.tar", "b.tar.gz", "src/list.csv"):
        out = tmp_path / f"out-{source.replace('/', '-')}"
        data("pack", tmp_path / source, out)
        assert contents(out) == want and Reader(out).classes == ["cat", "dog"]
        assert not (out / ".work").exists()
    reader = Reader(tmp_path / "out-src-list.csv")
    found = {s["name"]: s for s in (reader.sample(i) for i in range(len(reader)))}
    first = found[sorted(want)[0]]
    assert len(first["boxes"]) == 2 and len(found[sorted(want)[1]]["boxes"]) == 1
    pixels = first["boxes"][0] * np.array([first["width"], first["height"]] * 2)
    assert np.allclose(pixels, [5, 6, 20, 30], atol=1e-3)


def test_many_alike_and_unreadable_files_are_told(tmp_path):
    want = some_images(tmp_path / "src")
    for n in range(5):
        (tmp_path / "src" / "cat" / f"again-{n}.jpg").write_bytes(want["dog/0.jpg"])
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(
        f"src/{p.relative_to(tmp_path / 'src')},{p.parent.name}\n" for p in sorted((tmp_path / "src").rglob("*.jpg")))
        + "src/cat,cat\nsrc/nosuch.jpg,cat\n")
    report = data("pack", tmp_path / "list.csv", tmp_path / "out").stdout
    assert "6 of 12 images" in report  # cat/again-0.jpg comes first, and stays
    for line in ("4  duplicate\n", "1  duplicate of another class\n", "1  unreadable\n", "1  no such file\n"):
        assert line in report


def test_labels_are_those_of_a_given_map(tmp_path):
    some_images(tmp_path / "src")
    (tmp_path / "map.txt").write_text("zebra\ndog\ncat\n")
    data("pack", tmp_path / "src", tmp_path / "out", "--labels", tmp_path / "map.txt")
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == {"zebra": 0, "dog": 1, "cat": 2}
    reader = Reader(tmp_path / "out")
    assert {reader.sample(i)["class"]: int(reader.labels[i]) for i in range(6)} == {"dog": 1, "cat": 2}
    (tmp_path / "map.txt").write_text("dog\n")
    done = data("pack", tmp_path / "src", tmp_path / "out2", "--labels", tmp_path / "map.txt", code=2)
    assert "has no label for cat" in done.stderr


@pytest.mark.parametrize(("make", "says"), [
    (lambda p: None, "no such file or folder"),
    (lambda p: p.mkdir(), "no images in"),
    (lambda p: p.write_bytes(b"no tar at all"), "no images in"),
    (lambda p: p.write_bytes(b"\x1f\x8b" + b"x" * 100), "gzip stream is damaged"),
])
def test_what_is_no_source_is_one_line(tmp_path, make, says):
    make(tmp_path / "src")
    done = data("pack", tmp_path / "src", tmp_path / "out", code=2)
    assert says in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("oars: ")
    assert not (tmp_path / "out").exists()


def test_another_source_does_not_go_into_the_same_folder(tmp_path):
    some_images(tmp_path / "src")
    some_images(tmp_path / "src2", 4)
    data("pack", tmp_path / "src", tmp_path / "out")
    before = tree(tmp_path / "out")
    assert "already packed" in data("pack", tmp_path / "src", tmp_path / "out").stdout
    done = data("pack", tmp_path / "src2", tmp_path / "out", code=2)
    assert "holds shards of another source" in done.stderr and tree(tmp_path / "out") == before


# ---- one image ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("turned", range(1, 9))
def test_boxes_turn_with_their_image(turned):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[4:12, 6:30] = 255  # a white thing at (6, 4) to (30, 12)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = turned
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95, exif=exif)
    fit = examine(out.getvalue())
    notes = boxes.Notes(60, 40, (("n1", 6, 4, 30, 12),))
    ((x0, y0, x1, y1),), trouble = boxes.relative(notes, fit.width, fit.height, fit.turned)
    upright = np.asarray(Image.open(io.BytesIO(fit.jpeg)).convert("L")) > 128
    rows, columns = np.flatnonzero(upright.any(1)), np.flatnonzero(upright.any(0))
    assert trouble == [] and np.allclose([x0 * fit.width, y0 * fit.height, x1 * fit.width, y1 * fit.height],
                                         [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], atol=1.01)


def test_damaged_images_never_do_more_than_be_unfit():
    rng = np.random.default_rng(0)
    good = draw(0, False, 0, 0, 100).jpeg
    unfit = 0
    for trial in range(300):
        data = bytearray(good)
        for at in rng.integers(0, len(data), 8):
            data[at] = rng.integers(0, 256)
        try:
            fit = examine(bytes(data[:rng.integers(1, len(data))] if trial % 3 == 0 else data))
            assert fit.width * fit.height <= 64 << 20
        except Unfit as error:
            unfit += 1
            assert error.kind and "\n" not in error.reason
    assert unfit > 80


LARGE = """
import sys; from pathlib import Path; from PIL import Image
folder, exif = Path(sys.argv[1]), Image.Exif()
exif[0x0112] = 6
Image.new("RGB", (8192, 8192), "red").save(folder / "a.jpg")  # the largest that are taken, as they are...
Image.new("RGB", (8192, 8192), "green").save(folder / "b.jpg", progressive=True)
Image.new("CMYK", (8192, 4096), (9, 9, 0, 0)).save(folder / "c.jpg", exif=exif)  # ... and converted
Image.new("I;16", (8192, 4096), 999).save(folder / "d.png", compress_level=1)
Image.new("RGBA", (8192, 4096), "blue").save(folder / "e.png", compress_level=1)
Image.new("RGBA", (8193, 4096), "blue").save(folder / "f.png", compress_level=1)  # too large
"""
SMALL = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
PEAK = """
import resource, sys; from oars.cli import main
code = main(sys.argv[1:])
print("peak", max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
sys.exit(code)
"""


def test_memory_stays_below_500_mb_whatever_the_images(tmp_path):
    (tmp_path / "src" / "large").mkdir(parents=True)
    # In processes of their own: a child's peak begins with what its parent had, and this one may be large.
    subprocess.run([sys.executable, "-c", LARGE, tmp_path / "src" / "large"], check=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", SMALL, sys.executable, "-c", PEAK, "data", "pack", tmp_path / "src",
                           tmp_path / "out", "--workers", "1"], env=environment(), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    assert "5 of 6 images" in done.stdout and "too large" in done.stdout
    assert int(done.stdout.split("peak ")[1]) < 500_000  # kilobytes
