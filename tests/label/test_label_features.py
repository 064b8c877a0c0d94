"""``oars label --features``: what takes long comes while people label; what can hold code is not loaded."""

from __future__ import annotations

import contextlib
import pickle
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from labelling import CLASSES, ROWS, Server, images, source, truth
from running import oars, wait_for

from oars.label import simclr
from oars.label.client import Client
from oars.label.simclr import Learned, square

NOW = 1 << 40
EMBED = """import numpy as np

def embed(images):
    side = images.shape[1] // 4
    return np.sqrt(images)[:, side:-side, side:-side].reshape(len(images), -1).mean(1)[:, None] ** np.arange(1, 3)
"""


class Evil:
    """What a file of a stranger may hold."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def entered(server: Server) -> Client:
    return Client(server.port, server.token)


def label(client: Client, count: int) -> None:
    """The right classes for so many rows that are not in the exam."""
    rows = sorted(one["row"] for one in client.get("/api/boundary?n=500")["rows"])[:count]
    for name in CLASSES:
        client.post("/api/label", rows=[row for row in rows if truth(row) == name], how="human", seen=NOW,
                    **{"class": name})


def table(client: Client) -> dict[str, float | None]:
    return {one["name"]: one["balanced"] for one in client.settled(whole=True)["features"]}


def test_learning_that_was_interrupted_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    monkeypatch.setattr(simclr, "STEPS", 5)
    made = np.stack([square(image, 32) for image in images(60)])

    class Killed(Exception):
        pass

    def learned(name: str, most: int = 5) -> Learned:
        found = Learned(0, made)

        def done(step: int) -> None:
            if step == most < 5:
                found.keep(tmp_path / name)
                raise Killed

        found.learn(made, tmp_path / name, done)
        return found

    whole = learned("whole.pt").features(made)
    with pytest.raises(Killed):
        learned("cut.pt", 3)
    again = Learned(0)
    assert again.again(tmp_path / "cut.pt") and again.step == 3
    again.learn(made, tmp_path / "cut.pt", lambda step: None)
    assert np.array_equal(again.features(made), whole)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:3000])
    assert not Learned(0).again(tmp_path / "cut.pt") and not (tmp_path / "cut.pt").exists()


def test_people_label_while_features_are_learnt_and_a_killed_server_goes_on_with_it(tmp_path):
    source(tmp_path)
    server = Server(tmp_path, "run.h5", "--classes", ",".join(CLASSES), "--features", "ssl")
    client = entered(server)
    assert client.settled()["coming"] == "ssl"
    label(client, 60)
    wait_for(lambda: (client.get("/api/state")["progress"] or {}).get("what") == "learning from the images",
             "nothing is learnt", 120)
    state = tmp_path / "run.oars-label" / "features" / "ssl.pt"
    wait_for(lambda: torch.load(state, weights_only=True)["step"] >= 10, "nothing is kept", 120)
    assert client.get("/api/state")["coming"] == "ssl"
    assert client.get("/api/state")["model"]["features"] != "ssl"
    server.kill()
    step = torch.load(state, weights_only=True)["step"]
    assert step < simclr.STEPS
    client = entered(server := Server(tmp_path, "run.h5", "--features", "ssl"))
    found = client.settled(whole=True)
    assert found["model"]["features"] == "ssl" and found["labelled"] == 60 and found["note"] is None
    assert found["progress"] is None and torch.load(state, weights_only=True)["step"] == simclr.STEPS
    assert table(client)["ssl"] > 0.9
    server.end()
    client = entered(server := Server(tmp_path, "run.h5", "--features", "ssl"))
    began = time.monotonic()
    assert client.settled(whole=True)["model"]["features"] == "ssl" and time.monotonic() - began < 60
    server.end()


def test_auto_compares_what_was_learnt_with_the_others_when_there_are_enough_images(tmp_path):
    rows = 500
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["images"] = images(rows)
    evil = tmp_path / "ran"
    server = Server(tmp_path, "run.h5", "--classes", ",".join(CLASSES))
    folder = tmp_path / "run.oars-label" / "features"
    client = entered(server)
    client.settled()
    server.kill()
    wait_for(lambda: not _learns(tmp_path), "the child has not ended", 60)
    (folder / "ssl.npy").unlink(missing_ok=True)
    with open(folder / "ssl.pt", "wb") as out:  # as if somebody had put it there
        pickle.dump(Evil(evil), out)
    client = entered(server := Server(tmp_path, "run.h5"))
    client.settled()
    label(client, 60)
    found = table(client)
    assert set(found) == {"radial", "spots", "spots+radial", "ssl"} and None not in found.values()
    assert found["ssl"] > 0.9 and not evil.exists()
    server.end()


def _learns(folder: Path) -> bool:
    """Whether a child that learns is at work there."""
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"oars.label.late" in (one / "cmdline").read_bytes() and (one / "cwd").resolve() == folder.resolve():
                return True
    return False


def test_a_function_of_the_user_makes_features(tmp_path):
    source(tmp_path)
    (tmp_path / "my.py").write_text(EMBED)
    server = Server(tmp_path, "run.h5", "--classes", ",".join(CLASSES), "--features", "my.py:embed")
    client = entered(server)
    label(client, 60) if client.settled(whole=True) else None
    found = client.settled()
    assert found["model"]["features"] == "my.py:embed" and table(client)["my.py:embed"] > 0.95
    right = [one["guess"] == truth(one["row"]) for one in client.get("/api/boundary?n=50")["rows"]]
    assert np.mean(right) > 0.9
    server.end()
    kept = list((tmp_path / "run.oars-label" / "features").glob("own-*.npy"))
    assert len(kept) == 1 and np.load(kept[0]).shape == (ROWS, 2)
    # Another version of the file makes other features.
    (tmp_path / "my.py").write_text(EMBED.replace("arange(1, 3)", "arange(1, 4)"))
    client = entered(server := Server(tmp_path, "run.h5", "--features", "my.py:embed"))
    client.settled(whole=True)
    server.end()
    shapes = sorted(np.load(path).shape for path in (tmp_path / "run.oars-label" / "features").glob("own-*.npy"))
    assert shapes == [(ROWS, 2), (ROWS, 3)]


@pytest.mark.parametrize(("text", "why"), [
    ("def embed(images):\n    return images.no_such\n", "no_such' (line 2)"),
    ("def embed(images):\n    return images\n", "a row of numbers each is needed"),
    ("def embed(images):\n    return [[float('nan')]] * len(images)\n", "not numbers"),
    ("def other(images):\n    return 1\n", "has no function embed"),
    ("import os\n\ndef embed(images):\n    os.kill(os.getpid(), 9)\n", "could not be computed"),
    ("def embed(images) return 1\n", "SyntaxError"),
])
def test_a_function_that_does_not_work_is_one_line_and_labelling_goes_on(tmp_path, text, why):
    source(tmp_path)
    (tmp_path / "my.py").write_text(text)
    server = Server(tmp_path, "run.h5", "--classes", ",".join(CLASSES), "--features", "my.py:embed")
    client = entered(server)
    found = client.settled(whole=True)
    assert why in found["note"] and "my.py:embed" in found["note"] and "\n" not in found["note"]
    assert found["model"]["features"] == "spots+radial" and found["coming"] is None
    label(client, 10)
    assert client.settled()["labelled"] == 10
    server.end()


def test_files_that_can_hold_code_are_refused(tmp_path):
    source(tmp_path)
    ran = tmp_path / "ran"
    for name in ("net.pt2", "net.pt", "my.pkl"):
        with open(tmp_path / name, "wb") as out:
            pickle.dump(Evil(ran), out)
        refused = oars(tmp_path, "label", "run.h5", "--features", name, code=2).stderr
        assert "can hold code" in refused and "my.py:embed" in refused and refused.count("\n") == 1
    with open(tmp_path / "my.npy", "wb") as out:
        pickle.dump(Evil(ran), out)
    assert oars(tmp_path, "label", "run.h5", "--features", "my.npy", code=2).stderr.count("\n") == 1
    assert not ran.exists()


@pytest.mark.parametrize(("words", "why"), [
    (("--features", "none.py:embed"), "there is no file none.py"),
    (("--features", "my.py"), "my.py:embed"),
    (("--features", "my.py:1"), "no name of a function"),
    (("--features", "best"), "one of auto, radial"),
    (("--features", "ssl", "--live"), "still to come"),
    (("--features", "my.py:embed", "--live"), "still to come"),
])
def test_what_features_does_not_take_is_one_line(tmp_path, words, why):
    source(tmp_path)
    (tmp_path / "my.py").write_text(EMBED)
    refused = oars(tmp_path, "label", "run.h5", *words, code=2).stderr
    assert why in refused and refused.count("\n") == 1


def test_a_simulated_labeller_waits_for_the_features_it_asked_for(tmp_path):
    source(tmp_path)
    (tmp_path / "truth.csv").write_text("row,label\n" + "".join(f"{row},{truth(row)}\n" for row in range(ROWS)))
    (tmp_path / "my.py").write_text(EMBED)
    said = oars(tmp_path, "label", "run.h5", "--simulate", "truth.csv", "--features", "my.py:embed", code=0).stdout
    assert "120 of 120 images labelled" in said
    (tmp_path / "my.py").write_text("def embed(images):\n    return 1 / 0\n")
    refused = oars(tmp_path, "label", "run.h5", "--simulate", "truth.csv", "--features", "my.py:embed", code=2).stderr
    assert "division by zero (line 2)" in refused and refused.count("\n") == 1
