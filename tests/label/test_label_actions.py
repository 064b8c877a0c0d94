"""What people do on the page of ``oars label``, over HTTP: nothing is lost, doubled or overwritten."""

from __future__ import annotations

import csv
import struct
import threading
import zlib

import numpy as np
import pytest
from labelling import CLASSES, ROWS, SIDE, Server, images, source, truth

from oars.label.client import Client
from oars.label.errors import LabelError

NOW = 1 << 40  # as somebody who has seen everything


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actions")
    source(folder)
    server = Server(folder, "run.h5", "--classes", ",".join(CLASSES))
    yield server
    server.kill()


@pytest.fixture
def client(served):
    found = Client(served.port, served.token)
    found.settled()
    return found


def label(client, rows, name, how="human", seen=NOW):
    return client.post("/api/label", rows=list(rows), how=how, seen=seen, **{"class": name})


def table(client):
    """Row to label and how, as labels.csv says."""
    lines = csv.DictReader(client.ask("GET", "/api/labels.csv")[2].decode().splitlines())
    return {int(line["row"]): (line["label"], line["how"]) for line in lines}


def still(client, count=8):
    return [one["row"] for one in client.get(f"/api/boundary?n={count}")["rows"]]


def test_a_label_is_undone_and_redone(client):
    rows = still(client)
    before = table(client)
    label(client, rows, "dark", "page")
    after = table(client)
    assert after == before | {row: ("dark", "page") for row in rows}
    assert client.get("/api/state")["undo"]["what"] == "8 rows dark"
    label(client, rows[:2], "bright")
    label(client, rows[:1], None)
    for expected in (after | {row: ("bright", "human") for row in rows[:2]}, after, before):
        client.post("/api/undo")
        assert table(client) == expected
    client.post("/api/redo")
    assert table(client) == after
    client.post("/api/undo")
    history = client.get(f"/api/about?row={rows[0]}")["history"]
    assert [one["class"] for one in history][:3] == ["dark", "bright", None]


def test_classes_are_made_renamed_and_merged_and_each_is_undone(client):
    rows = still(client, 4)
    client.post("/api/class", name="grey")
    label(client, rows, "grey")
    names = lambda: [one["name"] for one in client.get("/api/state")["classes"]]  # noqa: E731
    client.post("/api/class/rename", **{"from": "grey", "to": "pale"})
    assert names() == [*CLASSES, "pale"] and table(client)[rows[0]][0] == "pale"
    client.post("/api/class/rename", **{"from": "pale", "to": "dark"})
    assert names() == [*CLASSES] and table(client)[rows[0]][0] == "dark"
    client.post("/api/undo")
    assert table(client)[rows[0]][0] == "pale"
    client.post("/api/undo")
    assert names() == [*CLASSES, "grey"]
    client.post("/api/undo")
    client.post("/api/undo")
    assert names() == [*CLASSES] and rows[0] not in table(client)
    with pytest.raises(LabelError, match="no class"):
        label(client, rows, "grey")


def test_the_exam_is_labelled_in_the_exam_only(client):
    exam = client.get("/api/exam")
    assert exam["total"] == ROWS // 5
    with pytest.raises(LabelError, match="exam"):
        label(client, [exam["row"]], "dark")
    other = still(client, 1)[0]
    assert label(client, [exam["row"], other], "dark")["skipped"] == 1
    with pytest.raises(LabelError, match="not in the exam"):
        label(client, [other], "dark", "exam")
    trained = client.settled()["model"]["labels"]
    label(client, [exam["row"]], truth(exam["row"]), "exam")
    assert client.get("/api/exam")["row"] != exam["row"]
    assert client.settled()["model"]["labels"] == trained
    shown = {row for page in client.get("/api/groups?size=60&n=50")["groups"] for row in page["rows"]}
    assert exam["row"] not in shown and not shown & set(table(client))
    client.post("/api/undo")
    client.post("/api/undo")


def test_what_two_people_say_differently_is_disputed_and_leaves_training(served, client):
    other = Client(served.port, served.token)
    rows = still(client, 3)
    seen = client.get("/api/state")["event"]
    assert label(client, rows, "dark", seen=seen)["conflicts"] == []
    answer = label(other, rows, "bright", seen=seen)
    assert answer["changed"] == 0 and [one["row"] for one in answer["conflicts"]] == sorted(rows)
    assert {one["class"] for one in answer["conflicts"]} == {"dark"}
    disputes = other.get("/api/disputes")["rows"]
    assert [one["row"] for one in disputes] == sorted(rows)
    assert {said["class"] for said in disputes[0]["labels"]} == {"dark", "bright"}
    state = other.settled()
    assert state["disputed"] == 3 and len({one["name"] for one in state["people"]}) >= 2
    assert all(table(client)[row] == ("", "disputed") for row in rows)
    label(other, rows, "bright")  # having seen the dispute
    assert other.get("/api/state")["disputed"] == 0 and table(client)[rows[0]] == ("bright", "human")
    other.post("/api/undo")
    other.post("/api/undo")
    assert table(client)[rows[0]] == ("dark", "human")
    client.post("/api/undo")
    assert rows[0] not in table(client)


def test_a_dispute_is_settled_by_whoever_says_so(served, client):
    other = Client(served.port, served.token)
    row, seen = still(client, 1)[0], client.get("/api/state")["event"]
    label(client, [row], "dark", seen=seen)
    label(other, [row], "bright", seen=seen)
    third = Client(served.port, served.token)
    third.post("/api/label", rows=[row], how="human", seen=seen, final=True, **{"class": "bright"})
    assert table(client)[row] == ("bright", "human") and client.get("/api/disputes")["rows"] == []
    for one in (third, other, client):
        one.post("/api/undo")


def test_an_action_that_is_sent_twice_is_done_once(client):
    row = still(client, 1)[0]
    words = dict(rows=[row], how="human", seen=NOW, action="a random name", **{"class": "dark"})
    first = client.post("/api/label", **words)
    again = client.post("/api/label", **words)
    assert again["event"] == first["event"] and again["changed"] == 0
    assert client.get("/api/state")["event"] == first["event"]
    client.post("/api/undo", action="another")
    assert client.post("/api/undo", action="another")["event"] == first["event"] + 1
    assert row not in table(client)


def test_an_action_of_another_project_is_not_done_here(client):
    row = still(client, 1)[0]
    words = dict(rows=[row], how="human", seen=NOW, **{"class": "dark"})
    before = client.get("/api/state")
    with pytest.raises(LabelError, match="another project") as refused:  # the page of what was served here before
        client.post("/api/label", **words, project="0123456789abcdef")
    assert refused.value.status == 421 and client.get("/api/state")["event"] == before["event"]
    assert client.post("/api/label", **words, project=before["project"])["changed"] == 1
    client.post("/api/undo", project=before["project"])
    assert row not in table(client)


def test_people_are_called_as_they_wish(served, client):
    other = Client(served.port, served.token)
    client.post("/api/person", name="Ada")
    assert client.get("/api/state")["person"] == "Ada"
    with pytest.raises(LabelError, match="called Ada already"):
        other.post("/api/person", name="Ada")
    row = still(client, 1)[0]
    label(client, [row], "dark")
    assert client.get(f"/api/about?row={row}")["by"] == "Ada"
    client.post("/api/undo")


def test_the_same_label_by_two_people_is_no_dispute(served, client):
    other = Client(served.port, served.token)
    rows = still(client, 2)
    seen = client.get("/api/state")["event"]
    label(client, rows, "dark", seen=seen)
    assert label(other, rows, "dark", seen=seen)["conflicts"] == []
    other.post("/api/undo")
    client.post("/api/undo")


def test_pictures_are_those_of_the_source(client):
    made = images()
    status, headers, data = client.ask("GET", "/api/image?row=4")
    assert (status, headers["X-Height"], headers["X-Width"], headers["X-Dtype"]) == (200, "32", "32", "uint16")
    assert np.array_equal(np.frombuffer(data, "<u2").reshape(SIDE, SIDE), made[4])
    for size in (32, 64, 96):
        data = client.ask("GET", f"/api/thumbs?rows=3,4,5&size={size}")[2]
        width, height = struct.unpack(">II", data[16:24])
        assert data[:4] == b"\x89PNG" and (width, height) == (3 * size, size)
        length = struct.unpack(">I", data[33:37])[0]
        pixels = np.frombuffer(zlib.decompress(data[41:41 + length]), np.uint8).reshape(size, 1 + 3 * size)
        assert pixels[:, 1:].max() == 255


def test_the_map_has_a_place_and_a_colour_for_every_row(client):
    for _ in range(600):
        status, _, data = client.ask("GET", "/api/map")
        if status == 200:
            break
        assert status == 202
        threading.Event().wait(0.1)
    places = np.frombuffer(data[4:], "<f4").reshape(-1, 2)
    assert struct.unpack("<I", data[:4])[0] == len(places) == ROWS and abs(places).max() <= 1
    assert len(client.ask("GET", "/api/map/colours")[2]) == ROWS
    near = client.get("/api/near?row=3&n=10")["rows"]
    assert len(set(near)) == 10 and 3 not in near and sum(truth(row) == truth(3) for row in near) >= 9


def test_guesses_are_accepted_only_after_an_audit_has_passed(client):
    assert "two classes" in client.get("/api/audit?class=dark")["refused"]
    label(client, [row for row in range(0, 60) if truth(row) == "bright"][:10], "bright", "page")
    label(client, [row for row in range(0, 60) if truth(row) == "dark"][:10], "dark", "page")
    client.settled()
    assert "one by one" in client.get("/api/audit?class=dark")["refused"]  # there is nothing to plant
    label(client, [row for row in range(60, 110) if truth(row) == "bright"], "bright")
    client.settled()
    with pytest.raises(LabelError, match="not passed") as refused:
        client.post("/api/accept", **{"class": "dark"})
    assert refused.value.status == 409
    drawn = client.get("/api/audit?class=dark")["rows"]
    planted = [row for row in drawn if truth(row) == "bright"]
    assert planted
    blind = client.post("/api/audit", rows=drawn, wrong=[], **{"class": "dark"})
    assert not blind["passed"] and blind["found"] == 0  # who sees no planted one has not looked
    with pytest.raises(LabelError, match="newest"):
        client.post("/api/audit", rows=drawn, wrong=planted, **{"class": "dark"})
    drawn = client.get("/api/audit?class=dark")["rows"]
    planted = [row for row in drawn if truth(row) == "bright"]
    with pytest.raises(LabelError, match="newest"):  # somebody with an older sample does not end this one
        client.post("/api/audit", rows=drawn[1:], wrong=[], **{"class": "dark"})
    found = client.post("/api/audit", rows=drawn, wrong=planted, **{"class": "dark"})
    assert found["found"] == found["planted"] and found["errors"] == 0
    assert found["passed"] == (found["upper"] <= 0.02) and not found["passed"]  # too few images to be sure
    with pytest.raises(LabelError, match="not passed"):
        client.post("/api/accept", **{"class": "dark"})
    for _ in range(3):
        client.post("/api/undo")


def test_nothing_is_lost_or_doubled_when_the_server_is_killed_in_the_midst(tmp_path):
    source(tmp_path)
    server = Server(tmp_path, "run.h5", "--classes", "dark,bright")
    client = Client(server.port, server.token)
    client.settled()
    exam = {row for row in range(ROWS)} - {row for page in client.get("/api/groups?size=256&n=100")["groups"]
                                           for row in page["rows"]}
    rows = [row for row in range(ROWS) if row not in exam]
    said: dict[int, int] = {}

    def work():
        try:
            for row in rows * 4:
                said[label(client, [row], truth(row))["event"]] = row
        except (OSError, LabelError):
            pass

    worker = threading.Thread(target=work)
    worker.start()
    while len(said) < 20:
        threading.Event().wait(0.01)
    server.kill()
    worker.join()
    again = Server(tmp_path, "run.h5", port=server.port)
    assert again.token == server.token
    after = Client(again.port, again.token)
    state = after.settled()
    events = [one for row in set(said.values()) for one in after.get(f"/api/about?row={row}")["history"]]
    found = [one["event"] for one in events]
    assert set(said) <= set(found) and len(found) == len(set(found))
    assert state["event"] - max(said) in (0, 1)  # at most the one that was on its way
    assert state["labelled"] - len(set(said.values())) in (0, 1)
    assert [one["name"] for one in state["classes"]] == ["dark", "bright"]
    assert all(table(after)[row] == (truth(row), "human") for row in said.values())
    again.kill()


def test_undo_goes_on_after_a_restart(tmp_path):
    source(tmp_path)
    server = Server(tmp_path, "run.h5", "--classes", "dark,bright")
    client = Client(server.port, server.token)
    client.settled()
    rows = still(client, 3)
    for row in rows:
        label(client, [row], "dark")
    client.post("/api/undo")
    cookie = client.cookie
    assert server.end() == 0
    again = Server(tmp_path, "run.h5", port=server.port)
    client = Client(again.port, again.token)
    client.cookie = cookie
    assert client.settled()["person"] == "person 1"
    client.post("/api/undo")
    assert set(table(client)) == {rows[0]}
    client.post("/api/redo")
    client.post("/api/redo")
    assert set(table(client)) == set(rows)
    assert again.end() == 0
    assert set(csv_rows(tmp_path)) == set(rows)


def csv_rows(folder):
    return [int(line["row"]) for line in csv.DictReader(open(folder / "run.oars-label" / "labels.csv"))]
