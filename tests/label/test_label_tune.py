"""What ``oars label`` fine-tunes by ``oars run`` is shown beside the others, and used only if the exam is better."""

from __future__ import annotations

import json
import time

import h5py
import numpy as np
from labelling import CLASSES, Server, images, truth
from running import wait_for

from oars.label.client import Client
from oars.label.learner import TUNED, Learner

NOW = 1 << 40
ROWS = 500


def tuned(client: Client) -> list[dict]:
    return [one for one in client.get("/api/state")["features"] if one["name"].startswith(TUNED)]


def test_a_network_is_fine_tuned_by_a_run_once_the_exam_can_judge_it(tmp_path):
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["images"] = images(ROWS)
    server = Server(tmp_path, "run.h5", "--classes", ",".join(CLASSES))
    client = Client(server.port, server.token)
    client.settled(whole=True)
    rows = [one["row"] for one in client.get("/api/boundary?n=500")["rows"]][:110]
    for name in CLASSES:
        client.post("/api/label", rows=[row for row in rows if truth(row) == name], how="human", seen=NOW,
                    **{"class": name})
    place = tmp_path / "run.oars-label" / "tune"
    time.sleep(3)
    assert not place.exists()  # there are labels enough, but no exam to judge by
    for _ in range(60):
        row = client.get("/api/exam")["row"]
        client.post("/api/label", rows=[row], how="exam", seen=NOW, **{"class": truth(row)})
    wait_for(lambda: tuned(client) or client.get("/api/state")["note"], "nothing is fine-tuned", 180)
    found, = tuned(client)
    assert found["name"] == f"{TUNED}, 110 labels" and found["balanced"] is None
    assert found["used"] == (found["exam"] > found["before"]) and found["exam"] > 0.9
    run, = (place / "oars-runs").iterdir()
    assert json.loads((run / "end.json").read_text())["code"] == 0
    assert client.get("/api/state")["progress"] is None
    server.end()


def test_what_was_fine_tuned_is_used_only_if_the_exam_was_better():
    rng = np.random.default_rng(0)
    kind = np.arange(200) % 2
    useful = rng.normal(size=(200, 4)).astype(np.float32) + 2 * kind[:, None].astype(np.float32)
    told: list[str] = []
    learner = Learner({"plain": useful}, None, 0, lambda: (len(told), np.arange(120), kind[:120]),
                      lambda: told.append(learner.name))

    def tune(values: np.ndarray | None, **known: float) -> None:
        before = len(told)
        learner.tune({"labels": 120, **known}, values)
        wait_for(lambda: len(told) > before and not learner.busy, "it does not learn")

    wait_for(lambda: told, "it does not learn")
    tune(None, exam=0.9, before=0.95)
    assert learner.name == "plain" and learner.table()[-1]["exam"] == 0.9 and not learner.table()[-1]["used"]
    tune(useful + 1, exam=0.97, before=0.95)
    assert learner.name == TUNED and learner.table()[-1]["used"] and TUNED not in learner.scores
    tune(None, exam=0.96, before=0.97)
    assert learner.name == TUNED  # of before; the newest did not help
    learner.end()
