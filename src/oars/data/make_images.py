"""Stand-ins for ImageNet's archives: textured photographs of made-up things, with boxes, and damage on request.

A class is a pattern: its kind, colour, direction and width. Each image shows one or two patches of it before a cloudy
background, at any place and size, so a network has to look, and can learn it in a minute. The archives are laid out as
the real ones: a tar of tars, a tar.gz of tar.gz with an XML file per image, a flat tar of validation images whose
classes are in a list of their own.
"""

from __future__ import annotations

import colorsys
import gzip
import io
import json
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from oars.data import tar, work
from oars.data.errors import DataError
from oars.data.work import zipped

# What --damage knows. Those in the first group change an image, the second its annotation, the third the archive.
DAMAGE = ("png", "gif", "cmyk", "16-bit", "exif", "truncated", "empty", "no-image", "bomb",
          "box-range", "box-order", "bad-xml", "entity-xml", "duplicate", "duplicate-other-class",
          "dotdot", "absolute", "link", "device", "cut-archive")
_ENTITIES = (b'<!DOCTYPE a [<!ENTITY b "' + b"b" * 64 + b'"><!ENTITY c "' + b"&b;" * 8
             + b'">]><annotation>&c;</annotation>')


class Picture(NamedTuple):
    """An image and its objects' corners in pixels."""

    jpeg: bytes
    width: int
    height: int
    boxes: list[tuple[int, int, int, int]]


def imagenet_like(out: Path, size: int, classes: int, side: int, damage: str, seed: int, workers: int) -> None:
    """Make the archives: ``size`` training images and a fifth of that to validate, evenly over the classes."""
    kinds = _kinds(damage)
    if size < classes * 2:
        raise DataError(f"--size {size} gives {classes} classes less than two images each")
    parts = out / ".work"
    parts.mkdir(parents=True)
    synsets = [f"n{1440764 + 10007 * k:08d}" for k in range(classes)]
    spoilt = _assign(kinds, size, classes, seed)
    order = np.random.default_rng([seed, 1]).permutation(np.arange(max(classes, size // 5)) % classes)
    tasks = [("train", k, synsets, size, side, seed, spoilt, parts, order) for k in range(classes)]
    tasks += [("val", begin, synsets, size, side, seed, {}, parts, order) for begin in range(0, len(order), 500)]
    bar = work.Bar("drawing", size + len(order))
    notes: dict[str, list[str]] = {}
    for found in work.each(_part, tasks, workers, bar):
        for kind, name in found:
            notes.setdefault(kind, []).append(name)
    _train(out, parts, synsets, notes, "cut-archive" in kinds)
    _val(out, parts, len(order))
    (out / "imagenet_2012_validation_synset_labels.txt").write_text("".join(f"{synsets[k]}\n" for k in order))
    if kinds:
        (out / "damage.json").write_text(json.dumps(notes, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(parts)
    print(f"{out}: {size:,} images of {classes} classes, {len(order):,} to validate"
          + f", {sum(map(len, notes.values()))} of them spoilt" * bool(kinds))


def _kinds(damage: str) -> list[str]:
    kinds = list(DAMAGE) if damage == "all" else [kind for kind in damage.split(",") if kind]
    for kind in kinds:
        if kind not in DAMAGE:
            raise DataError(f"--damage {kind} is unknown: use all, or some of {', '.join(DAMAGE)}")
    return kinds


def _assign(kinds: list[str], size: int, classes: int, seed: int) -> dict[int, str]:
    """Image number -> damage: each kind once per two hundred images, at least once."""
    wanted = [kind for kind in kinds if kind != "cut-archive" for _ in range(max(1, size // 200))]
    if len(wanted) > size // 2:
        raise DataError(f"{len(wanted)} spoilt images do not fit into --size {size}: make it {2 * len(wanted)} or more")
    # Not the first two of a class: these are what duplicates are made of.
    free = np.random.default_rng([seed, 2]).permutation(np.arange(2 * classes, size))
    return dict(zip(free.tolist(), wanted, strict=False))


def _part(task: tuple[Any, ...]) -> list[tuple[str, str]]:
    """One class of the training set, or some of the validation set: members of their archives, into two files."""
    which, k, synsets, size, side, seed, spoilt, parts, order = task
    done: list[tuple[str, str]] = []
    with open(parts / f"{which}-{k}.images", "wb") as images, open(parts / f"{which}-{k}.notes", "wb") as notes:
        if which == "train":
            numbers = range(k, size, len(synsets))  # image n is of class n modulo the number of classes
        else:
            numbers = range(k, min(k + 500, len(order)))
        for n in numbers:
            class_ = k if which == "train" else int(order[n])
            name = f"{synsets[k]}_{n * 37 + 10}" if which == "train" else f"ILSVRC2012_val_{n + 1:08d}"
            folder = f"Annotation/{synsets[k]}" if which == "train" else "val"
            picture = draw(seed, which == "val", n, class_, side)
            xml = annotation(name, synsets[class_], picture) if which == "val" or n % 3 or n in spoilt else b""
            member, file, extra = f"{name}.JPEG", picture.jpeg, b""
            if n in spoilt:
                other = k if spoilt[n] == "duplicate" else (k + 1) % len(synsets)
                file, xml, member, extra = spoil(spoilt[n], picture, xml, member, draw(seed, False, other, other, side))
                done.append((spoilt[n], member))
            images.write(extra or _member(member, file))
            if xml:
                notes.write(_member(f"{folder}/{name}.xml", xml))
            work.advance(1, len(file))
    return done


def _member(name: str, data: bytes) -> bytes:
    return tar.header(name, len(data)) + data + tar.padding(len(data))


def _train(out: Path, parts: Path, synsets: list[str], notes: dict[str, list[str]], cut: bool) -> None:
    """The tar of tars, and the tar.gz of tar.gz."""
    with open(out / "ILSVRC2012_img_train.tar", "wb") as file:
        for k, synset in enumerate(synsets):
            inner = (parts / f"train-{k}.images").read_bytes() + tar.END
            if cut and k == len(synsets) - 1:
                inner = inner[:len(inner) * 9 // 10]
                notes["cut-archive"] = [f"{synset}.tar"]
            file.write(_member(f"{synset}.tar", inner))
        file.write(tar.END)
    with gzip.GzipFile(filename="", mode="wb", fileobj=open(out / "Annotation.tar.gz", "wb"), mtime=0) as zip_:
        for k, synset in enumerate(synsets):
            zip_.write(_member(f"{synset}.tar.gz", zipped((parts / f"train-{k}.notes").read_bytes() + tar.END)))
        zip_.write(tar.END)


def _val(out: Path, parts: Path, count: int) -> None:
    begins = range(0, count, 500)
    with open(out / "ILSVRC2012_img_val.tar", "wb") as file:
        for begin in begins:
            file.write((parts / f"val-{begin}.images").read_bytes())
        file.write(tar.END)
    with gzip.GzipFile(filename="", mode="wb", fileobj=open(out / "ILSVRC2012_bbox_val_v3.tgz", "wb"), mtime=0) as zip_:
        for begin in begins:
            zip_.write((parts / f"val-{begin}.notes").read_bytes())
        zip_.write(tar.END)


# ---- one image ------------------------------------------------------------------------------------------------------

def draw(seed: int, val: bool, number: int, class_: int, side: int) -> Picture:
    """Image ``number`` of a set."""
    rng = np.random.default_rng([seed, val, number, 7])
    width, height = (max(32, int(side * rng.uniform(0.75, 1.25))) for _ in range(2))
    pixels = _clouds(rng, width, height)
    boxes = []
    for _ in range(1 + (rng.random() < 0.2)):
        w, h = (int(length * rng.uniform(0.45, 0.8)) for length in (width, height))
        x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
        boxes.append((x, y, x + w, y + h))
        v, u = np.mgrid[0:h, 0:w].astype(np.float32)
        mask = (((u - w / 2) / (w / 2)) ** 2 + ((v - h / 2) / (h / 2)) ** 2 < 1)[..., None]
        patch = _pattern(rng, class_, u / side, v / side)
        view = pixels[y:y + h, x:x + w]
        view[:] = np.where(mask, patch, view)
    pixels += rng.normal(0, 6, pixels.shape).astype(np.float32)
    out = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=int(rng.integers(80, 96)))
    return Picture(out.getvalue(), width, height, boxes)


def _clouds(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A background: noise of large and small scale."""
    out = np.full((height, width, 3), rng.uniform(70, 180, 3), np.float32)
    for cells, depth in ((3, 50), (12, 25), (48, 12)):
        noise = (rng.random((cells, cells, 3)) * 255).astype(np.uint8)
        large = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        out += (np.asarray(large, np.float32) - 128) * (depth / 128)
    return out


def _pattern(rng: np.random.Generator, class_: int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A class's look: stripes, checks, dots or rings in its colour, direction and width."""
    hue = (class_ * 0.381966 + rng.normal(0, 0.02)) % 1  # the golden section keeps neighbours apart
    bright = np.array(colorsys.hsv_to_rgb(hue, 0.75, rng.uniform(0.75, 1)), np.float32) * 255
    dark = np.array(colorsys.hsv_to_rgb((hue + 0.45) % 1, 0.5, rng.uniform(0.2, 0.45)), np.float32) * 255
    angle = class_ * 0.7 + rng.normal(0, 0.12)
    waves = (5 + 4 * (class_ // 4 % 4)) * rng.uniform(0.85, 1.15) * 2 * np.pi
    a = np.cos(angle) * u + np.sin(angle) * v
    b = np.cos(angle) * v - np.sin(angle) * u
    phase = rng.uniform(0, 2 * np.pi)
    wave = (np.sin(a * waves + phase), np.sin(a * waves + phase) * np.sin(b * waves),
            np.maximum(np.cos(a * waves), np.cos(b * waves)) - 0.5,
            np.sin(np.hypot(u - u.mean(), v - v.mean()) * waves + phase))[class_ % 4]
    share = (1 / (1 + np.exp(-4 * wave)))[..., None].astype(np.float32)
    return share * bright + (1 - share) * dark


def annotation(name: str, synset: str, picture: Picture) -> bytes:
    """The XML file of an image, as ImageNet's are."""
    objects = "".join(f"\t<object>\n\t\t<name>{synset}</name>\n\t\t<pose>Unspecified</pose>\n\t\t<truncated>0"
                      f"</truncated>\n\t\t<difficult>0</difficult>\n\t\t<bndbox>\n\t\t\t<xmin>{a}</xmin>\n\t\t\t<ymin>{b}</ymin>"
                      f"\n\t\t\t<xmax>{c}</xmax>\n\t\t\t<ymax>{d}</ymax>\n\t\t</bndbox>\n\t</object>\n"
                      for a, b, c, d in picture.boxes)
    return (f"<annotation>\n\t<folder>{synset}</folder>\n\t<filename>{name}</filename>\n\t<source>\n\t\t<database>"
            f"ILSVRC_2012</database>\n\t</source>\n\t<size>\n\t\t<width>{picture.width}</width>\n\t\t<height>"
            f"{picture.height}</height>\n\t\t<depth>3</depth>\n\t</size>\n\t<segmented>0</segmented>\n{objects}"
            "</annotation>\n").encode()


def spoil(kind: str, picture: Picture, xml: bytes, member: str, other: Picture) -> tuple[bytes, bytes, str, bytes]:
    """The image, the annotation and the member's name after one kind of damage; and, for what is no plain file, the
    member itself."""
    image = Image.open(io.BytesIO(picture.jpeg))
    jpeg, extra = picture.jpeg, b""
    if kind in ("png", "gif"):
        jpeg = _save(image, kind)
    elif kind == "cmyk":
        jpeg = _save(image.convert("CMYK"), "jpeg")
    elif kind == "16-bit":
        jpeg = _save(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257), "png")
    elif kind == "exif":  # as a camera held on its side stores it: turned left, with a note to turn it right
        exif = image.getexif()
        exif[0x0112] = 6
        jpeg = _save(image.transpose(Image.Transpose.ROTATE_90), "jpeg", exif=exif)
    elif kind == "truncated":
        jpeg = jpeg[:len(jpeg) // 2]
    elif kind in ("empty", "no-image"):
        jpeg = b"" if kind == "empty" else b"<html>404 not found</html>"
    elif kind == "bomb":  # a PNG header that claims 60000 × 60000 pixels
        png = bytearray(_save(Image.new("L", (8, 8)), "png"))
        png[16:24] = (60000).to_bytes(4, "big") * 2
        png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
        jpeg = bytes(png)
    elif kind == "box-range":
        xml = xml.replace(b"<xmax>", b"<xmax>9", 1)
    elif kind == "box-order":
        xml = xml.replace(b"xmin>", b"@>", 2).replace(b"xmax>", b"xmin>", 2).replace(b"@>", b"xmax>", 2)
    elif kind in ("bad-xml", "entity-xml"):
        xml = xml[:len(xml) // 2] if kind == "bad-xml" else _ENTITIES
    elif kind.startswith("duplicate"):
        jpeg = other.jpeg
    elif kind in ("dotdot", "absolute"):
        member = ("../../" if kind == "dotdot" else "/tmp/") + member
    elif kind in ("link", "device"):
        block = bytearray(tar.header(member, 0))
        block[156:157] = b"2" if kind == "link" else b"3"
        block[157:168] = b"/etc/passwd" if kind == "link" else bytes(11)
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        extra = bytes(block)
    return jpeg, xml, member, extra


def _save(image: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind.upper(), **options)
    return out.getvalue()
