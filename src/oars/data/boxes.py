"""Bounding boxes as ImageNet has them: archives of small XML files, one per image.

``Annotation.tar.gz`` holds an archive per class, ``ILSVRC2012_bbox_*`` the files themselves. Either is unpacked once,
as a stream, and nothing of it touches the disk. An image and its boxes belong together by the XML file's own name: the
name *inside* the XML is wrong in some ("%s"), and is not looked at. The XML parser knows no document types and no
entities.
"""

from __future__ import annotations

import marshal
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from oars.data import tar
from oars.data.errors import DataError

MAX_XML = 1 << 20
MAX_BOXES = 10_000
_SIDES = ("xmin", "ymin", "xmax", "ymax")


class Notes(NamedTuple):
    """What one XML file says: the image's size, and for each object its class and corners in pixels."""

    width: float
    height: float
    objects: tuple[tuple[str, float, float, float, float], ...]


class Problem(NamedTuple):
    """Something left out: where, of what kind, and why."""

    name: str
    kind: str
    reason: str


def parse(data: bytes) -> Notes:
    """Read one annotation; DataError says what is wrong with it."""
    if len(data) > MAX_XML:
        raise DataError(f"{len(data)} bytes of XML; at most {MAX_XML} are read")
    path: list[str] = []
    text: list[str] = []
    size = {"width": 0.0, "height": 0.0}
    objects: list[dict[str, str]] = []

    def start(tag: str, _: dict[str, str]) -> None:
        path.append(tag)
        text.clear()
        if tag == "object" and len(path) == 2:
            objects.append({})
            if len(objects) > MAX_BOXES:
                raise DataError(f"more than {MAX_BOXES} objects")
        if len(path) > 20:
            raise DataError("XML nested more than 20 deep")

    def end(tag: str) -> None:
        value = "".join(text).strip()
        if path[1:2] == ["size"] and tag in size:
            size[tag] = _number(value, tag)
        elif path[1:2] == ["object"] and (tag in _SIDES or (tag == "name" and len(path) == 3)):
            objects[-1][tag] = value
        path.pop()
        text.clear()

    def refuse(*_: object) -> None:
        raise DataError("XML with a document type, which annotations do not have")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = text.append
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise DataError(f"unparsable XML ({error})") from None
    found = []
    for each in objects:
        if any(side not in each for side in _SIDES):
            raise DataError("an object without xmin, ymin, xmax and ymax")
        found.append((each.get("name", ""), *(_number(each[side], side) for side in _SIDES)))
    return Notes(size["width"], size["height"], tuple(found))  # type: ignore[arg-type]


def _number(text: str, what: str) -> float:
    if not re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", text):
        raise DataError(f"{what} is {text[:20]!r}, not a number")
    return float(text)


class Annotations:
    """Notes by the name of the image without its ending; half a million of ImageNet's take about 130 MB."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, stem: str) -> bool:
        return stem in self._packed

    def __setitem__(self, stem: str, notes: Notes) -> None:
        self._packed[stem] = marshal.dumps(tuple(notes))

    def get(self, stem: str) -> Notes | None:
        """What was noted of this image."""
        packed = self._packed.get(stem)
        return Notes(*marshal.loads(packed)) if packed else None


def read(path: Path) -> tuple[Annotations, list[Problem]]:
    """All annotations of an archive (or a folder), and what is wrong with the others."""
    found = Annotations()
    problems: list[Problem] = []
    for name, data in _files(path, problems):
        stem = os.path.basename(name).rsplit(".", 1)[0]
        try:
            if stem in found:
                raise DataError("another annotation of the same image came before")
            found[stem] = parse(data)
        except DataError as error:
            problems.append(Problem(name, "bad annotation", str(error)))
    return found, problems


def _files(path: Path, problems: list[Problem]) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for found in sorted(path.rglob("*.xml")):
            yield str(found.relative_to(path)), found.read_bytes()
        return
    try:
        with open(path, "rb") as file:
            plain = tar.Window(file, 0, os.fstat(file.fileno()).st_size)
            yield from _walk(tar.Unzipped(plain) if path.name.endswith("gz") else plain, path.name, problems)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _walk(source: tar.Source, place: str, problems: list[Problem], deep: int = 0) -> Iterator[tuple[str, bytes]]:
    """The XML files of an archive and of the archives in it; a damaged one ends there, and the rest goes on."""
    try:
        for member in tar.members(source):
            if member.refused:
                problems.append(Problem(f"{place}/{member.name}", "refused member", member.refused))
            elif member.name.endswith(".xml"):
                yield member.name, source.read(min(member.size, MAX_XML + 1))
            elif member.name.endswith((".tar", ".tar.gz", ".tgz")) and deep == 0:
                inner = _Within(source, member.size)
                yield from _walk(tar.Unzipped(inner) if member.name.endswith("gz") else inner,
                                 f"{place}/{member.name}", problems, 1)
    except DataError as error:
        problems.append(Problem(place, "damaged archive", str(error)))


class _Within:
    """The bytes of the current member of a stream, as a stream."""

    def __init__(self, source: tar.Source, size: int) -> None:
        self._source, self._size, self._left = source, size, size

    def read(self, count: int) -> bytes:
        data = self._source.read(min(count, self._left))
        self._left -= len(data)
        return data

    def skip(self, count: int) -> bool:
        count = min(count, self._left + 1)
        self._left -= count
        return self._left >= 0 and self._source.skip(count)

    def tell(self) -> int:
        return self._size - self._left


def relative(notes: Notes, width: int, height: int, turned: int) -> tuple[list[list[float]], list[tuple[str, str]]]:
    """Boxes from 0 to 1 on the upright image of this size, and (kind, reason) for each that was changed or left out."""
    sideways = turned in (5, 6, 7, 8)
    stored = (height, width) if sideways else (width, height)  # as the file had it before it was turned
    full = (notes.width or stored[0], notes.height or stored[1])
    # Most were drawn on the image as stored; where the XML's size is that of the upright image, on that.
    turn = turned if not (sideways and full == (width, height) and width != height) else 1
    good, trouble = [], []
    for _, x0, y0, x1, y1 in notes.objects:
        text = f"({x0:g}, {y0:g}, {x1:g}, {y1:g}) in {full[0]:g} × {full[1]:g}"
        if x0 > x1 or y0 > y1:
            trouble.append(("box with min > max", text))
            continue
        box = [x0 / full[0], y0 / full[1], x1 / full[0], y1 / full[1]]
        clipped = [min(1.0, max(0.0, v)) for v in box]
        if clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
            trouble.append(("box outside its image or empty", text))
            continue
        if clipped != box:
            trouble.append(("box clipped to its image", text))
        good.append([round(v, 6) for v in _turn(clipped, turn)])
    return good, trouble


def _turn(box: list[float], turned: int) -> list[float]:
    """A box after EXIF's orientation was carried out."""
    x0, y0, x1, y1 = box
    if turned in (2, 3):
        x0, x1 = 1 - x1, 1 - x0
    if turned in (3, 4):
        y0, y1 = 1 - y1, 1 - y0
    if turned in (5, 6, 7, 8):
        x0, y0, x1, y1 = y0, x0, y1, x1  # mirrored at the diagonal; 6, 7 and 8 are that and a flip
        if turned in (6, 7):
            x0, x1 = 1 - x1, 1 - x0
        if turned in (7, 8):
            y0, y1 = 1 - y1, 1 - y0
    return [x0, y0, x1, y1]
