"""Two people who change classes of ``oars label`` at once: no undo or redo takes away what the other has done."""

from __future__ import annotations

import contextlib
import json
import sqlite3

import pytest
from labelling import Server, source
from running import oars

from oars.label.client import Client
from oars.label.errors import LabelError

NOW = 1 << 40


@pytest.fixture
def server(tmp_path):
    source(tmp_path)
    server = Server(tmp_path, "run.h5", "--classes", "dark,bright")
    yield server
    server.kill()


@pytest.fixture
def people(server):
    return [Client(server.port, server.token) for _ in range(2)]


def names(client):
    return [one["name"] for one in client.get("/api/state")["classes"]]


def merge(client, old, new):
    client.post("/api/class/rename", **{"from": old, "to": new})


def label(client, name):
    client.post("/api/label", rows=list(range(20)), how="human", seen=NOW, **{"class": name})


def refused(client, what, match):
    before = client.get("/api/state")
    with pytest.raises(LabelError, match=match) as found:
        client.post(f"/api/{what}")
    assert found.value.status == 409
    after = client.get("/api/state")
    assert (after["event"], after["classes"]) == (before["event"], before["classes"])


def test_two_classes_never_stand_for_each_other(server, people):
    one, other = people
    merge(one, "dark", "bright")
    one.post("/api/undo")
    merge(other, "bright", "dark")
    refused(one, "redo", "bright is no class of its own any more")
    assert names(one) == ["dark"]


def test_a_log_in_which_two_classes_stand_for_each_other_is_opened(server, people, tmp_path):
    one, other = people
    merge(one, "dark", "bright")
    one.post("/api/undo")
    merge(other, "bright", "dark")
    label(one, "dark")  # it is lost below, not on disk: the redo comes before it
    server.kill()
    with contextlib.closing(sqlite3.connect(tmp_path / "run.oars-label" / "log.sqlite")) as log, log:
        merges = [n for n, in log.execute("select n from event where kind = 'merge' order by n")]
        log.execute("update event set kind = 'redo', data = ? where kind = 'label'", (json.dumps({"of": merges[0]}),))
    assert "0 of 150" in oars(tmp_path, "label", "run.h5", "--export", code=0).stdout
    again = Server(tmp_path, "run.h5", port=server.port)
    client = Client(again.port, again.token)
    assert names(client) == ["dark"]
    label(client, "dark")
    again.kill()


def test_a_class_that_others_use_is_not_taken_back(people):
    one, other = people
    one.post("/api/class", name="grey")
    label(other, "grey")
    count = one.get("/api/state")["labelled"]
    refused(one, "undo", "grey is in use")
    assert one.get("/api/state")["labelled"] == count > 0
    merge(other, "grey", "dark")
    refused(one, "undo", "grey is in use")
    other.post("/api/undo")
    other.post("/api/undo")
    one.post("/api/undo")
    assert names(one) == ["dark", "bright"]
    refused(other, "redo", "grey was taken back")


def test_no_two_classes_get_the_same_name(people):
    one, other = people
    one.post("/api/class", name="grey")
    one.post("/api/undo")
    other.post("/api/class", name="grey")
    refused(one, "redo", "another class grey")

    merge(one, "grey", "pale")  # a new name
    other.post("/api/class", name="grey")
    refused(one, "undo", "another class grey")
    merge(other, "pale", "white")
    refused(one, "undo", "has called pale white")

    merge(one, "dark", "bright")
    other.post("/api/class", name="dark")
    refused(one, "undo", "another class dark")
    assert names(one) == ["bright", "white", "grey", "dark"]
