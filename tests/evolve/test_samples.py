"""``oars run --samples thin`` on real ranks: the same samples are left out on any number of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from running import Run, said

from oars.evolve.thinning import Samples

SCRIPT = Path(__file__).parent / "scripts" / "thin.py"


def test_the_same_samples_are_left_out_on_one_rank_and_on_two(tmp_path):
    one, two = (Run(tmp_path / f"on-{ranks}", "-n", ranks, "--samples", "thin", "--of-run", "60", SCRIPT,
                    OARS_DIGEST="1") for ranks in (1, 2))
    assert one.code == two.code == 0, f"{one}\n{two}"
    for line, other in zip(one.lines, two.lines, strict=True):
        words, others = line.split(), other.split()
        assert words[:2] == others[:2] and words[4:] == others[4:]
        assert abs(float(words[2]) - float(others[2])) < 1e-3
    steps, read = zip(*((int(w) for w in line.split()[:2]) for line in one.lines), strict=True)
    assert set(steps) == {10}  # what len(loader) says stays
    assert read[0] == 400 and all(200 < count < 330 for count in read[1:5])
    assert read[4] < read[5] < 400  # the last 8 of 60 steps are whole
    assert [line.split()[4] for line in one.lines] == ["400"] * 6  # who evaluates sees all
    assert len(set(two.digests().values())) == 1
    out = said(two.cwd, "show", "it", "--samples").splitlines()
    assert out[0].startswith("400 samples, 6 passes: ") and "samples never; the mean loss is" in out[0]
    assert out[-2].startswith("never left out: ") and " more (left_out == 0 in oars-runs/it/samples.npz)" in out[-2]
    assert out[-1] == "oars-runs/it/samples.png" and (two.folder / "samples.png").exists()
    with np.load(one.folder / "samples.npz") as a, np.load(two.folder / "samples.npz") as b:
        assert (a["left_out"] == b["left_out"]).all() and np.allclose(a["losses"], b["losses"], atol=1e-3)


def test_losses_that_are_not_known_leave_nothing_out(tmp_path):
    run = Run(tmp_path, "-n", "1", "--samples", "thin", SCRIPT, "own")
    assert run.code == 0, run
    assert [line.split()[1] for line in run.lines] == ["400"] * 6
    assert "no samples are left out: losses of single samples are not known here" in run.err


def test_weights_make_up_for_what_is_left_out():
    samples = Samples(20_000, 7)
    samples.note(np.arange(20_000), np.random.default_rng(0).exponential(size=20_000))
    away = samples.away()
    batch = samples.thinned(list(range(20_000)), away)
    low = samples.losses < samples.losses.mean()
    assert 0.48 < 1 - (len(batch.samples) - (~low).sum()) / low.sum() < 0.52
    assert abs((samples.losses[batch.samples] * batch.weights).sum() / batch.of / samples.losses.mean() - 1) < 0.02
    samples.passes += 1
    assert (samples.away()[0] != away[0]).sum() > 4000  # another pass, other samples


def test_what_cannot_be_is_one_line(tmp_path):
    assert said(tmp_path, "run", "--of-run", "9", SCRIPT, code=2) == "oars: --of-run 9 is for --samples thin\n"
    assert said(tmp_path, "run", "-n", "2", "--samples", "thin", "--sync", "gossip", SCRIPT, code=2) == (
        "oars: --samples thin needs ranks that share each batch: leave out --sync gossip\n")
    assert said(tmp_path, "run", "--samples", "thin", "--snapshot", "5steps", SCRIPT, code=2) == (
        "oars: --snapshot 5steps holds no losses of samples: leave it out with --samples thin\n")
    (tmp_path / "oars-runs" / "empty").mkdir(parents=True)
    (tmp_path / "oars-runs" / "empty" / "run.json").write_text(
        '{"script": "a.py", "args": [], "module": false, "cwd": "", "ranks": 1}')
    assert "knows nothing of samples" in said(tmp_path, "show", "empty", "--samples", code=2)
