"""Shards: any tool reads them, ours reads sample i at once, and damage is an error and never another picture."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from oars.data import shards, tar
from oars.data.errors import DataError
from oars.data.pack import pack
from oars.data.shards import Reader


def jpeg(number: int, side: int = 24) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (side, side + number % 5, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of 31 images of 3 classes, packed into several shards."""
    root = tmp_path_factory.mktemp("shards")
    for n in range(31):
        folder = root / "src" / f"class-{n % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"bild-ä-{n}.jpg").write_bytes(jpeg(n))
    assert pack(root / "src", root / "out", workers=2, shard_bytes=10_000) == 0
    return root


def everything(folder) -> list:
    reader = Reader(folder)
    samples = [reader.sample(i) for i in range(len(reader))]
    return [reader.classes, *({**s, "boxes": s["boxes"].tolist()} for s in samples)]


def test_every_sample_is_read_with_its_own_bytes_and_label(packed):
    reader = Reader(packed / "out")
    assert len(reader) == 31 and reader.classes == ["class-0", "class-1", "class-2"]
    assert len(list((packed / "out").glob("*.tar"))) > 2
    names = set()
    for i in range(31):
        sample = reader.sample(i)
        data, label = reader.image(i)
        assert sample["image"] == bytes(data) == (packed / "src" / sample["name"]).read_bytes()
        assert sample["class"] == sample["name"].split("/")[0] == reader.classes[label] and sample["label"] == label
        assert (sample["width"], sample["height"]) == Image.open(io.BytesIO(data)).size
        names.add(sample["name"])
    assert len(names) == 31
    assert reader.sample(-1)["name"] == reader.sample(30)["name"]
    with pytest.raises(IndexError):
        reader.image(31)


def read_in_child(reader, i, pipe):
    pipe.send(bytes(reader.image(i)[0]))


def test_a_reader_can_be_pickled_and_used_after_a_fork(packed):
    reader = Reader(packed / "out")
    want = bytes(reader.image(7)[0])
    assert bytes(pickle.loads(pickle.dumps(reader)).image(7)[0]) == want
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=read_in_child, args=(reader, 7, theirs))
    child.start()
    assert ours.poll(20) and ours.recv() == want
    child.join()


def test_webdataset_and_tarfile_read_the_shards(packed):
    import webdataset

    paths = sorted(str(p) for p in (packed / "out").glob("*.tar"))
    theirs = list(webdataset.WebDataset(paths, shardshuffle=False))
    reader = Reader(packed / "out")
    assert len(theirs) == 31
    for i, sample in enumerate(theirs):
        data, label = reader.image(i)
        assert sample["jpg"] == bytes(data) and int(sample["cls"]) == label
        assert json.loads(sample["json"])["name"] == reader.sample(i)["name"]
    with tarfile.open(paths[0]) as archive:
        members = archive.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in members} == {(0, 0, 0, 0o644, "")}


def test_shards_of_other_tools_are_read_without_an_index(tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / f"x-{shard}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for n in range(3):
                key = f"{'long' * 40}/{shard}-{n}"  # longer than a plain header holds
                for kind, data in (("jpg", jpeg(n)), ("cls", b"%d" % n), ("json", b'{"class":"c"}')):
                    info = tarfile.TarInfo(f"{key}.{kind}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    reader = Reader(tmp_path)
    assert len(reader) == 6 and reader.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert reader.sample(4)["image"] == jpeg(1) and reader.sample(4)["class"] == "c"
    assert len(Reader(tmp_path / "x-1.tar")) == 3


def test_damage_anywhere_is_told_or_does_not_matter(packed, tmp_path):
    good = everything(packed / "out")
    files = sorted(p for p in (packed / "out").iterdir() if p.is_file())
    rng, told = random.Random(5), 0
    copy = tmp_path / "copy"
    shutil.copytree(packed / "out", copy)
    for trial in range(400):
        path = files[trial % len(files)]
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(1, 256)
        if rng.random() < 0.25:
            del data[rng.randrange(len(data)):]
        (copy / path.name).write_bytes(data)
        try:
            assert everything(copy) == good, f"trial {trial}: {path.name} was changed, and nobody noticed"
        except DataError as error:
            told += 1
            assert str(copy) in str(error) and "\n" not in str(error)
        shutil.copy(path, copy / path.name)
    assert 200 < told < 400  # what is left are tar headers and padding, which our reader has no use for


@pytest.mark.parametrize("name", ["shard-000000.tar", "index.npy", "labels.json", "manifest.json"])
def test_a_missing_or_empty_file_is_one_line(packed, tmp_path, name):
    shutil.copytree(packed / "out", tmp_path / "copy")
    for broken in ("empty", "missing"):
        if broken == "empty":
            (tmp_path / "copy" / name).write_bytes(b"")
        else:
            os.unlink(tmp_path / "copy" / name)
            if name == "manifest.json":
                continue  # then it is a folder of tar files like any other
        with pytest.raises(DataError) as error:
            everything(tmp_path / "copy")
        assert name in str(error.value)


def test_a_manifest_cannot_name_files_elsewhere(packed, tmp_path):
    shutil.copytree(packed / "out", tmp_path / "copy")
    facts = shards.read_manifest(tmp_path / "copy")
    for change in ({"shards": [{**facts["shards"][0], "name": "../../secret"}]}, {"shards": 3}, {"samples": 2**60},
                   {"samples": "all"}, {"labels": None}):
        (tmp_path / "copy" / "manifest.json").write_bytes(shards.encode_manifest({**facts, **change}))
        with pytest.raises(DataError):
            everything(tmp_path / "copy")


def test_a_gzip_bomb_is_not_unpacked():
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(DataError, match="200 times"):
        tar.Unzipped(io.BytesIO(bomb)).read(50_000_000)
    text = gzip.compress(b"<annotation/>" * 1000) + gzip.compress(b"more") + bytes(20)
    assert tar.Unzipped(io.BytesIO(text)).read(1 << 20) == b"<annotation/>" * 1000 + b"more"


# ---- tar headers ----------------------------------------------------------------------------------------------------

def archive(form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for name, size in (("a.jpg", 0), ("b/" + "n" * 90 + ".jpg", 513), ("ü/" * 90 + "c.jpg", 70_000), ("d", 512)):
            info = tarfile.TarInfo(name)
            info.size = size
            file.addfile(info, io.BytesIO(bytes(size)))
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
    return out.getvalue()


def listed(data: bytes) -> list[tar.Member]:
    return list(tar.members(tar.Window(io.BytesIO(data), 0, len(data))))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(form):
    data = archive(form) if form != tarfile.USTAR_FORMAT else b""
    if not data:  # ustar cannot hold the long name
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as file:
            for name in ("x" * 120 + "/" + "y" * 90, "z"):
                file.addfile(tarfile.TarInfo(name))
        data = out.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        want = [(m.name, m.offset_data, m.size) for m in file if m.isfile()]
    assert [(m.name, m.offset, m.size) for m in listed(data)] == want and len(want) >= 2


def test_a_damaged_header_is_told_and_never_the_quiet_end_of_the_archive():
    good, data = listed(archive(tarfile.GNU_FORMAT)), archive(tarfile.GNU_FORMAT)
    rng, told = random.Random(3), 0
    content = [range(m.offset, m.offset + m.size) for m in good]
    for _ in range(300):
        at = rng.randrange(len(data))
        if any(at in part for part in content):
            at = 512 * rng.randrange(3) + rng.randrange(512)
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        try:
            assert len(listed(bytes(changed))) >= len(good)
        except DataError:
            told += 1
    assert told > 150
    for size in range(0, len(data) - 10240 + 512, 256):  # cut off anywhere before its end mark
        with pytest.raises(DataError, match="cut off"):
            listed(data[:size])


@pytest.mark.parametrize(("name", "kind", "why"), [
    ("/etc/passwd", tarfile.REGTYPE, "absolute"), ("a/../../b", tarfile.REGTYPE, r"\.\."),
    ("C:\\x", tarfile.REGTYPE, "absolute"), ("l", tarfile.SYMTYPE, "link"), ("h", tarfile.LNKTYPE, "link"),
    ("d", tarfile.CHRTYPE, "device"), ("p", tarfile.FIFOTYPE, "pipe")])
def test_members_that_lead_elsewhere_are_refused(name, kind, why):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        file.addfile(info)
    (member,) = listed(out.getvalue())
    assert re.search(why, member.refused)
