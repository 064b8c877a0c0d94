"""Damaged and changed sources, hostile files, a full disk, network file systems: one clear line, nothing lost."""

from __future__ import annotations

import io
import json
import os
import resource
import sqlite3
import struct
import threading
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from labelling import ROWS, Server, images, source, truth
from PIL import Image
from running import oars

import oars as package
from oars.data.errors import DataError
from oars.label.client import Client
from oars.label.desk import Actor
from oars.label.errors import LabelError
from oars.label.folder import open_folder
from oars.label.log import Log, filesystem, journal_for
from oars.label.serving import Serving

NOW = 1 << 40


def line(folder, *words):
    """The one line with which ``oars label`` refuses."""
    done = oars(folder, "label", *words, code=2)
    assert done.stderr.startswith("oars: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_what_is_no_source_of_images_is_one_line(tmp_path):
    assert "no images" in line(tmp_path, table(tmp_path))
    (tmp_path / "cut.h5").write_bytes(source(tmp_path).read_bytes()[:3000])
    assert "cut.h5" in line(tmp_path, "cut.h5")
    np.save(tmp_path / "few.npy", np.zeros((3, 2), np.float32))
    assert "150 rows" in line(tmp_path, "run.h5", "--features", "few.npy")
    np.save(tmp_path / "code.npy", np.array([Bomb(tmp_path / "ran")] * ROWS, object), allow_pickle=True)
    assert "code.npy" in line(tmp_path, "run.h5", "--features", "code.npy")
    assert not (tmp_path / "ran").exists()
    assert "one of auto" in line(tmp_path, "run.h5", "--features", "magic")


class Bomb:
    """Unpickling it runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def table(folder):
    (folder / "table.csv").write_text("a,b\n1,2\n3,4\n")
    return "table.csv"


def test_a_source_that_has_changed_is_refused_and_one_that_was_copied_is_not(tmp_path):
    source(tmp_path)
    server = Server(tmp_path, "run.h5", "--classes", "dark,bright")
    client = Client(server.port, server.token)
    client.settled()
    rows = [one["row"] for one in client.get("/api/boundary?n=40")["rows"]]
    for name in ("dark", "bright"):
        client.post("/api/label", how="human", seen=NOW, rows=[row for row in rows if truth(row) == name],
                    **{"class": name})
    assert "is open in another oars label" in line(tmp_path, "run.h5")
    os.utime(tmp_path / "run.h5")  # while it is served
    answer = client.ask("GET", "/api/image?row=3")
    assert answer[0] == 200 or "has changed" in json.loads(answer[2])["error"]
    assert server.end() == 0
    assert "40 of 150" in oars(tmp_path, "label", "run.h5", "--export", code=0).stdout

    data = package.data.open(tmp_path / "run.h5", labels=tmp_path / "run.labels.csv")
    assert len(data) == 40 and data.classes == ["dark", "bright"]
    made = images()
    for (image, label), row in zip(data, sorted(rows), strict=True):
        assert np.array_equal(image, made[row]) and data.classes[label] == truth(row)
    with pytest.raises(DataError, match="none of its 40 labels is one of exam"):
        package.data.open(tmp_path / "run.h5", labels=tmp_path / "run.labels.csv", how=["exam"])
    with pytest.raises(ValueError, match="how="):
        package.data.open(tmp_path / "run.h5", labels=tmp_path / "run.labels.csv", how="human")

    source(tmp_path, seed=1)  # as many images, but others
    assert "is another image" in line(tmp_path, "run.h5", "--export")
    with pytest.raises(DataError, match="is not the image that was labelled"):
        package.data.open(tmp_path / "run.h5", labels=tmp_path / "run.labels.csv")
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["images"] = images(20)
    assert "it has 20 rows and had 150" in line(tmp_path, "run.h5", "--export")
    (tmp_path / "run.oars-label" / "project.json").write_text("{")
    assert "project.json is damaged" in line(tmp_path, "run.h5", "--export")
    source(tmp_path, seed=0)
    (tmp_path / "run.oars-label" / "log.sqlite").write_bytes(b"no data base" * 100)
    (tmp_path / "run.oars-label" / "project.json").unlink()
    assert "log of labels" in line(tmp_path, "run.h5", "--export")


def test_a_full_disk_is_said_and_what_was_answered_stays(tmp_path):
    """The system refuses to let files grow, as it does when the disk is full."""
    source(tmp_path)
    server = Server(tmp_path, "run.h5", "--classes", "dark,bright")
    client = Client(server.port, server.token)
    client.settled()
    rows = [one["row"] for one in client.get("/api/boundary?n=100")["rows"]]
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))
    saved = []
    with pytest.raises(LabelError, match="nothing was saved") as refused:
        for row in rows:
            client.post("/api/label", rows=[row], how="human", seen=NOW, **{"class": truth(row)})
            saved.append(row)
    assert refused.value.status == 507
    before = client.get("/api/state")
    assert before["labelled"] == len(saved)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
    client.post("/api/label", rows=rows[-1:], how="human", seen=NOW, **{"class": "dark"})
    server.kill()
    again = Server(tmp_path, "run.h5", port=server.port)
    client = Client(again.port, again.token)
    assert client.get("/api/state")["labelled"] == len(saved) + 1
    again.kill()


def test_labels_csv_is_written_by_one_at_a_time(tmp_path, monkeypatch):
    """As the thread that follows the actions, and the end of the command, do."""
    source(tmp_path)
    monkeypatch.chdir(tmp_path)
    folder = open_folder("run.h5", None, 0)
    serving = Serving(folder, "auto", 1)
    try:
        serving.desk.add_class(Actor("one"), "dark")
        serving.desk.label(Actor("one"), list(range(ROWS)), "dark", "human", NOW)
        writers = [threading.Thread(target=lambda: [serving.export() for _ in range(25)]) for _ in range(6)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert serving.note is None
        assert len(folder.file("labels.csv").read_text().splitlines()) == 1 + ROWS - len(folder.exam)
    finally:
        serving.close()


def png(width, height):
    """A file of a hundred bytes that says it is so large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(data)) + kind + data
                                          + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)


def test_hostile_images_and_names_are_shown_as_grey_and_as_text(tmp_path):
    folder = tmp_path / "shots"
    folder.mkdir()
    names = ["=cmd()|x.png", "<img src=x onerror=alert(1)>.png", "-a,b\n.png"]
    for at in range(20):
        out = io.BytesIO()
        Image.fromarray((np.arange(256).reshape(16, 16) + at).astype(np.uint8)).save(out, "PNG")
        (folder / (names[at] if at < 3 else f"{at}.png")).write_bytes(out.getvalue())
    (folder / "bomb.png").write_bytes(png(12000, 12000))
    (folder / "cut.png").write_bytes(out.getvalue()[:45])
    (folder / "text.png").write_bytes(b"#!/bin/sh\n")
    server = Server(tmp_path, "shots", "--classes", "a,b")
    client = Client(server.port, server.token)
    state = client.settled()
    assert "3 images cannot be read" in state["note"] and state["rows"] == 23
    order = sorted(os.listdir(folder))
    bomb = order.index("bomb.png")
    status, _, answer = client.ask("GET", f"/api/image?row={bomb}")
    assert status == 500 and "12000 × 12000 pixels" in json.loads(answer)["error"]
    for row in (order.index("cut.png"), order.index("text.png")):
        assert client.ask("GET", f"/api/image?row={row}")[0] == 500
    assert client.ask("GET", f"/api/thumbs?rows={bomb}&size=96")[0] == 200
    assert client.ask("GET", f"/api/image?row={order.index('5.png')}")[0] == 200
    rows = [order.index(name) for name in names]
    exam = client.get("/api/exam")["total"]
    client.post("/api/label", rows=list(range(23)), how="page", seen=NOW, **{"class": "a"})
    text = client.ask("GET", "/api/labels.csv")[2].decode()
    assert text.count('"-a,b\n.png"') == 0 and ",=cmd" not in text
    assert client.get("/api/state")["labelled"] == 23 - exam
    assert client.get(f"/api/about?row={rows[1]}")["key"] == names[1]
    server.kill()


def test_a_network_file_system_gets_a_journal_that_works_there(tmp_path):
    mounts = ("proc /proc proc rw 0 0\n/dev/sda / ext4 rw 0 0\nhost:/home /home nfs4 rw 0 0\n"
              "pool /home/my\\040data lustre rw 0 0\n/dev/sdb /home2 xfs rw 0 0\n")
    for path, kind, journal in (("/home/me/x", "nfs4", "truncate"), ("/home2/x", "xfs", "wal"),
                                ("/tmp", "ext4", "wal"), ("/home/my data/x", "lustre", "truncate")):
        assert filesystem(Path(path), mounts) == kind and journal_for(kind) == journal
    log = Log(tmp_path / "log.sqlite", "truncate")
    for number in range(3):
        assert log.add("me", "class", {"name": str(number)}) == number + 1
    assert not (tmp_path / "log.sqlite-wal").exists()
    with sqlite3.connect(tmp_path / "log.sqlite") as other:
        assert other.execute("pragma journal_mode").fetchone() == ("truncate",) or \
            other.execute("pragma journal_mode").fetchone() == ("delete",)
    log.close()
    assert [event[4]["name"] for event in Log(tmp_path / "log.sqlite", "truncate").events()] == ["0", "1", "2"]
