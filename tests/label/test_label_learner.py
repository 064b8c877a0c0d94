"""The model of ``oars label``: the same labels give the same model, and it learns what it is asked to."""

from __future__ import annotations

import csv
import re
import time

import numpy as np
import pytest
from labelling import ROWS, images, source, truth
from running import oars

from oars.label import pixels
from oars.label.chances import upper, wilson
from oars.label.choose import near
from oars.label.head import Head, balanced, clusters, standard
from oars.label.learner import Learner


@pytest.fixture(scope="module")
def features():
    made = images()
    shape = pixels.Geometry.seen(list(made))
    return standard(np.stack([pixels.radial(image, shape) for image in made]))


def test_the_same_labels_give_the_same_guesses(features):
    rows = np.arange(0, 40)
    labels = np.array([truth(row) == "bright" for row in rows]).astype(int)
    one, two = (Head(features[rows], labels).chances(features) for _ in range(2))
    assert np.array_equal(one, two)
    right = one.argmax(1) == [truth(row) == "bright" for row in range(ROWS)]
    assert right.mean() > 0.97
    assert balanced(features[rows], labels) > 0.9
    assert balanced(np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32), labels) < 0.75


def test_clusters_and_neighbours_are_exact(features):
    of, far = clusters(features, 2, 0)
    bright = np.array([truth(row) == "bright" for row in range(ROWS)])
    assert max((of == bright).mean(), (of != bright).mean()) > 0.95 and (far >= 0).all()

    away = ((features - features[9]) ** 2).sum(1)
    norms = (features ** 2).sum(1)
    assert near(features, norms, 9, 5) == [row for row in np.argsort(away, kind="stable") if row != 9][:5]


def test_features_are_compared_from_fifty_labels_on():
    rng = np.random.default_rng(0)
    kind = np.arange(200) % 2
    useful = rng.normal(size=(200, 6)).astype(np.float32) + 3 * kind[:, None].astype(np.float32)
    useless = rng.normal(size=(200, 6)).astype(np.float32)
    told = []
    count = [40]
    learner = Learner({"useful": useful, "useless": useless}, None, 0,
                      lambda: (count[0], np.arange(count[0]), kind[:count[0]]), lambda: told.append(learner.name))

    def again(labels):
        count[0] = labels
        before = len(told)
        learner.again()
        while len(told) == before or learner.busy:
            time.sleep(0.01)

    again(40)
    assert learner.name == "useless" and learner.separates is None  # the last is taken until it is known better
    again(60)
    assert learner.name == "useful" and learner.separates
    table = {one["name"]: one["balanced"] for one in learner.table()}
    assert table["useful"] > 0.95 > 0.75 > table["useless"]
    learner.end()


def test_intervals_are_those_of_the_tables():
    assert wilson(95, 100) == pytest.approx((0.888, 0.978), abs=0.001)
    assert upper(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), abs=1e-6)
    assert upper(3, 300) == pytest.approx(0.0256, abs=0.0003)
    assert upper(5, 5) == upper(0, 0) == 1


def test_a_simulated_labeller_says_what_it_will_cost(tmp_path):
    source(tmp_path)
    (tmp_path / "truth.csv").write_text("row,label\n" + "".join(f"{row},{truth(row)}\n" for row in range(ROWS)))
    said = oars(tmp_path, "label", "run.h5", "--simulate", "truth.csv", "--features", "radial", code=0).stdout
    actions, done, right = re.match(r"groups: (\d+) actions, (\d+) of 120 images labelled, ([\d.]+) %", said).groups()
    assert int(actions) < 40 and int(done) == 120 and float(right) > 97
    assert "exam: 30 actions, the model is right on 1" in said
    assert not (tmp_path / "run.oars-label").exists()
    (tmp_path / "truth.csv").write_text("row,label\n0,dark\n")
    refused = oars(tmp_path, "label", "run.h5", "--simulate", "truth.csv", code=2).stderr
    assert "one line for each of the 150 rows" in refused and refused.count("\n") == 1


def test_hard_shots_have_four_unbalanced_classes(tmp_path):
    oars(tmp_path, "data", "make", "water-ice", "shots", "--hard", "--size", 100, "--workers", 1, code=0)
    with open(tmp_path / "shots" / "truth.csv") as file:
        names = [line["label"] for line in csv.DictReader(file)]
    assert set(names) == {"water", "ice", "empty", "streak"} and 50 < names.count("water") < 80
    refused = oars(tmp_path, "data", "make", "digits", "d", "--hard", code=2).stderr
    assert "water-ice" in refused
