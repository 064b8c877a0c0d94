"""Where images come from: ImageNet's archives, tar files, folders of folders, CSV lists.

Each becomes an ``ImageSet``: for every image its name, its class, and the place of its bytes, found without reading the
images themselves. An archive within an archive is a window on the outer file, so nothing is unpacked. What cannot be
used is noted with the reason and left out.
"""

from __future__ import annotations

import csv
import json
import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from oars.data import boxes, tar
from oars.data.boxes import Annotations, Notes, Problem
from oars.data.errors import DataError

IMAGES = (".jpeg", ".jpg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
# ImageNet's own names: per set the images, where its boxes may be, and where its classes are if not in the archive.
IMAGENET = {
    "train": ("ILSVRC2012_img_train.tar", ("Annotation.tar.gz", "ILSVRC2012_bbox_train_v2.tar.gz"), ""),
    "val": ("ILSVRC2012_img_val.tar", ("ILSVRC2012_bbox_val_v3.tgz",), "imagenet_2012_validation_synset_labels.txt"),
}


@dataclass
class ImageSet:
    """Images and where they are, in columns: ImageNet has 1.3 million."""

    title: str
    files: list[Path]
    names: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # of each image
    file: array = field(default_factory=lambda: array("l"))
    offset: array = field(default_factory=lambda: array("q"))
    size: array = field(default_factory=lambda: array("q"))
    boxes: Annotations = field(default_factory=Annotations)
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str, class_: str, file: int, offset: int, size: int) -> None:
        """Note one more image."""
        self.names.append(name)
        self.classes.append(class_)
        self.file.append(file)
        self.offset.append(offset)
        self.size.append(size)

    def path(self, i: int) -> Path:
        """The file that holds image ``i``: an archive, or the image itself."""
        return self.files[self.file[i]] if self.file[i] >= 0 else self.files[0] / self.names[i]

    def notes(self, i: int) -> Notes | None:
        """What is noted of image ``i``: under its whole name (lists), or under that of the file (ImageNet)."""
        return self.boxes.get(self.names[i]) or self.boxes.get(stem(self.names[i]))

    @property
    def damaged(self) -> bool:
        """Whether an archive is damaged, so that images may be missing."""
        return any(problem.kind == "damaged archive" for problem in self.problems)


def find(source: Path, annotations: Path | None, spool: Path) -> list[ImageSet]:
    """The sets of images in ``source``; a compressed archive is unpacked once, into ``spool``."""
    if not source.exists():
        raise DataError(f"no such file or folder: {source}")
    if source.is_dir() and any((source / archive).exists() for archive, _, _ in IMAGENET.values()):
        sets = [_imagenet(source, title) for title in IMAGENET if (source / IMAGENET[title][0]).exists()]
    elif source.is_dir():
        sets = [_folder(source)]
    elif source.suffix.lower() in (".csv", ".tsv"):
        sets = [_list(source)]
    else:
        sets = [_tar(source, "", spool)]
    if annotations is not None:
        if len(sets) > 1:
            raise DataError(f"{source} holds several sets, each with its own boxes: leave out --boxes")
        _add_boxes(sets[0], annotations)
    for images in sets:
        _finish(images, source)
    return sets


def _imagenet(folder: Path, title: str) -> ImageSet:
    archive, annotations, classes = IMAGENET[title]
    images = _tar(folder / archive, title, None)
    for name in annotations:
        if (folder / name).exists():
            _add_boxes(images, folder / name)
            break
    if classes and (folder / classes).exists():
        synsets = (folder / classes).read_text().split()
        for i, name in enumerate(images.names):
            number = re.search(r"(\d+)\.\w+$", name)
            if not number or not 1 <= int(number[1]) <= len(synsets):
                raise DataError(f"{folder / classes} has {len(synsets)} lines: none for {name}")
            images.classes[i] = synsets[int(number[1]) - 1]  # line n belongs to image n, wherever it lies
    return images


def _add_boxes(images: ImageSet, annotations: Path) -> None:
    images.boxes, problems = boxes.read(annotations)
    images.problems += problems


def _finish(images: ImageSet, source: Path) -> None:
    """Give a class to those that have none yet: the one that their annotation names."""
    for i, name in enumerate(images.names):
        if not images.classes[i]:
            notes = images.notes(i)
            if notes is None or not notes.objects:
                raise DataError(f"{name} in {source} has no class: put images into a folder (or a tar file) per class, "
                                "or list them in a CSV file with columns path and label")
            images.classes[i] = notes.objects[0][0]
    if not images.names:
        raise DataError(f"no images in {source}: expected files named {', '.join(IMAGES)}")


def stem(name: str) -> str:
    """A file's name without folders and ending: what an image and its annotation share."""
    return os.path.basename(name).rsplit(".", 1)[0]


# ---- tar files ------------------------------------------------------------------------------------------------------

def _tar(path: Path, title: str, spool: Path | None) -> ImageSet:
    with _open(path) as file:
        if file.read(2) == b"\x1f\x8b":
            if spool is None:
                raise DataError(f"{path} is compressed, which ImageNet's is not: gunzip it")
            path = _unzip(path, spool)
    images = ImageSet(title, [path])
    with _open(path) as file:
        whole = tar.Window(file, 0, os.fstat(file.fileno()).st_size)
        _scan(images, file, whole, whole.end, "", path.name)
    return images


def _scan(images: ImageSet, file: IO[bytes], window: tar.Window, end: int, class_: str, place: str) -> None:
    """Note the images of an archive and of the archives in it; one that is damaged ends there, and the rest goes on."""
    try:
        for member in tar.members(window):
            folder, _, base = member.name.rpartition("/")
            name = f"{class_}/{base}" if class_ else member.name
            if member.refused:
                images.problems.append(Problem(f"{place}/{member.name}", "refused member", member.refused))
            elif member.offset + member.size > end:
                pass  # cut off: the next step says so
            elif member.name.endswith(".tar") and not class_:
                inner = tar.Window(file, member.offset, member.size)
                _scan(images, file, inner, inner.end, stem(member.name), f"{place}/{member.name}")
            elif base.lower().endswith(IMAGES):
                images.add(name, class_ or os.path.basename(folder), 0, member.offset, member.size)
            else:
                images.problems.append(Problem(f"{place}/{member.name}", "no image by its name", "left out"))
    except DataError as error:
        images.problems.append(Problem(place, "damaged archive", str(error)))


def _unzip(path: Path, spool: Path) -> Path:
    """A compressed archive as a plain one: images in it can then be found by position."""
    plain = spool / "source.tar"
    if not plain.exists():
        part = plain.with_suffix(".tmp")
        with _open(path) as packed, open(part, "wb") as out:
            stream = tar.Unzipped(packed)
            try:
                while data := stream.read(1 << 20):
                    out.write(data)
            except DataError as error:
                part.unlink()
                raise DataError(f"{path}: {error}") from None
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, plain)
    return plain


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


# ---- folders and lists ----------------------------------------------------------------------------------------------

def _folder(root: Path) -> ImageSet:
    """A folder per class, with images in it at any depth."""
    images = ImageSet("", [root])
    for folder, inner, files in os.walk(root):
        inner.sort()
        place = os.path.relpath(folder, root)
        for name in sorted(files):
            if place != "." and name.lower().endswith(IMAGES):
                path = os.path.join(place, name)
                images.add(path, place.split(os.sep)[0], -1, 0, os.path.getsize(os.path.join(root, path)))
    return images


def _list(path: Path) -> ImageSet:
    """A CSV file with columns path and label, and xmin, ymin, xmax, ymax (in pixels) where there are boxes; an image
    with several boxes has a row for each."""
    images = ImageSet("", [path.parent])
    seen: dict[str, int] = {}
    corners: dict[str, list[tuple[str, float, float, float, float]]] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","):
            name, label = row.get("path"), row.get("label")
            if name is None or label is None:
                raise DataError(f"{path} needs a first line with path and label among its columns")
            if name not in seen:
                try:
                    size = os.path.getsize(path.parent / name)
                except (OSError, ValueError):
                    images.problems.append(Problem(name, "no such file", f"listed in {path.name}"))
                    continue
                seen[name] = len(seen)
                images.add(name, label, -1, 0, size)
            elif images.classes[seen[name]] != label:
                raise DataError(f"{path}: {name} is listed as {images.classes[seen[name]]} and as {label}")
            if row.get("xmin"):
                try:
                    x0, y0, x1, y1 = (float(row[side] or "") for side in ("xmin", "ymin", "xmax", "ymax"))
                except (KeyError, ValueError):
                    images.problems.append(Problem(name, "bad annotation", "its box is no four numbers"))
                else:
                    corners.setdefault(name, []).append((label, x0, y0, x1, y1))
    for name, found in corners.items():
        images.boxes[name] = Notes(0.0, 0.0, tuple(found))
    return images


# ---- the label map --------------------------------------------------------------------------------------------------

def label_map(classes: Iterable[str], given: Path | None) -> dict[str, int]:
    """Class name -> label: 0, 1, ... in the order of the sorted names, or as a file has it (labels.json, or lines)."""
    found = set(classes)
    if given is None:
        numbers = all(name.isdecimal() for name in found)
        return {name: i for i, name in enumerate(sorted(found, key=lambda name: (int(name) if numbers else 0, name)))}
    try:
        text = given.read_text()
        names = json.loads(text) if given.suffix == ".json" else {n: i for i, n in enumerate(text.split("\n")) if n}
    except (OSError, ValueError) as error:
        raise DataError(f"{given} is no label map: {error}") from None
    if not isinstance(names, dict) or sorted(names.values()) != list(range(len(names))):
        raise DataError(f"{given} is no label map: it should give the labels 0, 1, 2, ... to class names")
    if missing := sorted(found - set(names)):
        raise DataError(f"{given} has no label for {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1))
    return dict(sorted(names.items(), key=lambda item: item[1]))
