"""``oars label --live`` on a file and a folder that really grow: new images count, old ones stay what they were."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from labelling import CLASSES, ROWS, RUNNING, SIDE, Server, images, truth
from PIL import Image
from running import environment, said, start

from oars.label.client import Client
from oars.label.folder import RECORD

NOW = 1 << 40
DRIFTED = 240  # images of the second half, of which all are bright


class Growing:
    """An HDF5 file that this process writes while others read it."""

    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path, "w", libver="latest")
        self.images = self.file.create_dataset("images", (0, SIDE, SIDE), np.uint16, chunks=(1, SIDE, SIDE),
                                               maxshape=(None, SIDE, SIDE))
        self.file.swmr_mode = True

    def add(self, more: np.ndarray) -> None:
        done = len(self.images)
        self.images.resize(done + len(more), 0)
        self.images[done:] = more
        self.images.flush()


def until(client: Client, true, what: str, seconds: float = 60) -> dict:
    end = time.monotonic() + seconds
    while not true(found := client.get("/api/live")):
        assert time.monotonic() < end, (what, {name: found[name] for name in ("processed", "behind", "newest",
                                                                             "changes")}, client.get("/api/state"))
        time.sleep(0.1)
    return found


def entered(server: Server) -> Client:
    client = Client(server.port, server.token)
    client.settled()
    return client


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def growing(place):
    found = Growing(place / "run.h5")
    yield found
    found.file.close()


@pytest.fixture(scope="module")
def served(place, growing):
    made = images()
    growing.add(made[:20])
    # Before there are enough images to begin with, it waits.
    process = start(place, "label", "run.h5", "--live", DISPLAY="", WAYLAND_DISPLAY="")
    RUNNING.append(process)
    assert process.stdout is not None and "waiting for its first 50 images" in process.stdout.readline()
    process.kill()
    process.communicate()
    growing.add(made[20:])
    server = Server(place, "run.h5", "--live", "--classes", ",".join(CLASSES))
    yield server
    server.kill()


def test_without_labels_there_are_densities_and_unusual_images_only(served, growing):
    client = entered(served)
    state = client.get("/api/state")
    assert state["live"] and state["rows"] == ROWS
    assert client.get("/api/live")["processed"] == 0
    more = images(60, seed=1)
    more[33] = 4000  # nothing like it was there before
    growing.add(more)
    found = until(client, lambda one: one["processed"] == 60, "60 images")
    assert found["shares"] == {} and found["changes"] == [] and found["margins"]["counts"] == []
    assert {"row": ROWS + 33, "why": "brighter than all of the first 150"} in found["newest"]
    assert len(found["newest"]) < 10
    density = found["densities"]["radial intensity"]
    step = density["x"][1] - density["x"][0]
    assert sum(density["y"]) * step == pytest.approx(1, abs=0.05)
    assert client.get("/api/state")["rows"] == ROWS + 60


def test_new_images_are_classified_and_a_change_of_shares_is_found(served, growing):
    client = entered(served)
    rows = sorted(one["row"] for one in client.get("/api/boundary?n=500")["rows"])[:40]  # without the exam's
    for name in CLASSES:
        client.post("/api/label", rows=[row for row in rows if truth(row) == name], how="human", seen=NOW,
                    **{"class": name})
    client.settled()
    bright = images(3 * DRIFTED, seed=2)[::3]
    growing.add(images(180, seed=3))
    growing.add(bright)
    count = 60 + 180 + DRIFTED
    found = until(client, lambda one: one["processed"] == count, f"{count} images")
    assert found["shares"]["bright"][0] == pytest.approx(1 / 3, abs=0.15) and found["shares"]["bright"][-1] > 0.9
    change = [one for one in found["changes"] if one["class"] == "bright"]
    assert len(change) == 1 and change[0]["from"] < 0.45 and change[0]["to"] > 0.9
    assert len(found["times"]) == len(found["shares"]["dark"]) and sum(found["margins"]["counts"]) == count
    share = found["densities"]["the share of bright"]
    assert share["x"][int(np.argmax(share["y"]))] == pytest.approx((80 + DRIFTED) / count, abs=0.06)
    # A new image is one like all others: it has a picture, a guess, neighbours, and it can be labelled.
    row = ROWS + count - 1
    about = client.get(f"/api/about?row={row}")
    assert about["guess"] == "bright" and about["key"] == f"run.h5:{row}"
    assert np.array_equal(np.frombuffer(client.ask("GET", f"/api/image?row={row}")[2], "<u2").reshape(SIDE, SIDE),
                          bright[-1])
    assert client.ask("GET", f"/api/thumbs?rows=0,{row}&size=64")[0] == 200
    assert len(client.get(f"/api/near?row={row}&n=5")["rows"]) == 5
    client.post("/api/label", rows=[row], how="human", seen=NOW, **{"class": "bright"})


def test_what_was_known_stays_and_a_killed_server_goes_on(place, served, growing):
    folder = place / "run.oars-label"
    client = entered(served)
    rows = client.get("/api/state")["rows"]
    project = json.loads((folder / "project.json").read_text())
    before = {path.name: path.read_bytes() for path in [*folder.glob("features/*.npy"), folder / "checksums.npy"]}
    served.kill()
    with open(folder / "live.bin", "ab") as file:
        file.write(b"half a record")
    growing.add(images(30, seed=4))
    again = Server(place, "run.h5", "--live")
    client = entered(again)
    found = until(client, lambda one: one["processed"] == rows + 30 - ROWS, "30 images more")
    assert found["shares"]["bright"][0] < 0.5
    assert client.get(f"/api/about?row={rows - 1}")["class"] == "bright"
    assert again.end() == 0
    assert {path.name: path.read_bytes() for path in [*folder.glob("features/*.npy"), folder / "checksums.npy"]
            } == before
    now = json.loads((folder / "project.json").read_text())
    assert {name: now[name] for name in ("rows", "exam", "looked_at")} == {
        name: project[name] for name in ("rows", "exam", "looked_at")}
    assert (folder / "live.bin").stat().st_size == (rows + 30 - ROWS) * RECORD.itemsize
    growing.file.close()
    said(place, "label", "run.h5", "--export")
    lines = {int(line["row"]): line for line in csv.DictReader((place / "run.labels.csv").read_text().splitlines())}
    assert lines[rows - 1]["label"] == "bright" and lines[rows - 1]["check"] != "00000000"
    import oars.data

    data = oars.data.open(str(place / "run.h5"), labels=str(place / "run.labels.csv"))
    assert len(data) == 41


def test_a_folder_of_images_grows(tmp_path):
    shots, made = tmp_path / "shots", images(70)
    shots.mkdir()
    for row in range(60):
        Image.fromarray(made[row]).save(shots / f"shot-{row:04}.png")
    server = Server(tmp_path, "shots", "--live")
    client = entered(server)
    half = tmp_path / "half.png"
    Image.fromarray(made[60]).save(half)
    data = half.read_bytes()
    with open(shots / "shot-0060.png", "wb") as file:  # written in two goes
        file.write(data[:len(data) // 2])
        file.flush()
        time.sleep(0.7)
        file.write(data[len(data) // 2:])
    (shots / "shot-0061.png").write_bytes(b"no image")
    Image.fromarray(made[62]).save(shots / "shot-0062.png")
    found = until(client, lambda one: one["processed"] == 3, "three images")
    assert [one["row"] for one in found["newest"] if one["why"] == "it cannot be read"] == [61]
    assert np.array_equal(np.frombuffer(client.ask("GET", "/api/image?row=60")[2], "<u2").reshape(SIDE, SIDE), made[60])
    assert client.get("/api/about?row=62")["key"] == "shot-0062.png"
    Image.fromarray(made[63]).save(shots / "shot-0000b.png")  # it would shift the rows
    end = time.monotonic() + 30
    while not (note := client.get("/api/state")["note"]):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "shot-0000b.png came, which stands before shot-0001.png" in note
    assert client.get("/api/state")["rows"] == 63 and server.end() == 0


def test_an_image_that_ends_its_reader_is_left_out(tmp_path):
    armed, shots, made = tmp_path / "armed", tmp_path / "shots", images(62)
    for folder in (armed, shots):
        folder.mkdir()
    (armed / "sitecustomize.py").write_text("""
import os, signal
import PIL.Image
opened = PIL.Image.open
def open_(file, *more, **named):
    if hasattr(file, "getvalue") and file.getvalue() == b"deadly":
        os.kill(os.getpid(), signal.SIGKILL)  # as a decoder does that damage leads astray
    return opened(file, *more, **named)
PIL.Image.open = open_
""")
    for row in range(55):
        Image.fromarray(made[row]).save(shots / f"{row:04}.png")
    server = Server(tmp_path, "shots", "--live", PYTHONPATH=f"{armed}{os.pathsep}{environment()['PYTHONPATH']}")
    client = entered(server)
    (tmp_path / "deadly").write_bytes(b"deadly")
    for row in range(55, 62):
        if row != 58:
            Image.fromarray(made[row]).save(shots / f"{row:04}.png")
        else:
            (tmp_path / "deadly").rename(shots / "0058.png")
    found = until(client, lambda one: one["processed"] == 7, "seven images")
    assert [one["row"] for one in found["newest"] if one["why"] == "it cannot be read"] == [58]
    assert client.get("/api/state")["note"] is None and server.end() == 0


def test_it_says_when_it_does_not_keep_up(tmp_path):
    growing = Growing(tmp_path / "run.h5")
    growing.add(images(60))
    server = Server(tmp_path, "run.h5", "--live")
    client = entered(server)
    until(client, lambda one: one["rate"] == 0, "rest")
    children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)], capture_output=True,
                              text=True, check=True).stdout.splitlines()
    reader = int(next(line.split()[0] for line in children if "oars.label.live" in line))
    found = {}
    growing.add(images(1500, seed=1))
    for _ in range(60):  # a reader that has little of a processor
        os.kill(reader, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(reader, signal.SIGSTOP)
        time.sleep(0.2)
        found = client.get("/api/live")
        if found["behind"]:
            break
    os.kill(reader, signal.SIGCONT)
    assert 0 < found["behind"] <= 1500, found["processed"]
    until(client, lambda one: one["processed"] == 1500 and not one["behind"], "it catches up")
    assert server.end() == 0
    growing.file.close()


def test_the_simulated_experiment_is_followed(tmp_path):
    made = start(tmp_path, "data", "make", "water-ice", "shots", "--size", "150", "--stream", "8", "--drift",
                 "--workers", "1")
    RUNNING.append(made)
    assert made.stdout is not None
    assert "grows by 8 images a second" in made.stdout.readline()
    server = Server(tmp_path, "shots/water-ice.h5", "--live")
    client = entered(server)
    rows = client.get("/api/state")["rows"]
    assert 50 <= rows <= 150  # as many as came before it could look
    until(client, lambda one: one["processed"] == 150 - rows, "all images")
    assert made.wait(30) == 0 and server.end() == 0
    with h5py.File(tmp_path / "shots/water-ice.h5") as file:
        kinds = file["labels"][:]
        assert file["images"].shape == (150, 256, 256)
    assert kinds[75:].mean() > kinds[:75].mean()
    assert [path.name for path in (tmp_path / "shots").iterdir()] == ["water-ice.h5"]
