"""The comparison itself: it must see what it is there to see."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from compare import files_differ, lines_differ, same_line


def test_floats_may_differ_in_the_last_digits_only():
    assert same_line("loss 0.693147181", "loss 0.693147240")
    assert not same_line("loss 0.693147181", "loss 0.693247181")
    assert same_line("tensor([ 0.1234, -0.0000])", "tensor([0.1235, 0.0000])")
    assert not same_line("loss 0.5", "loss 0.6")


def test_words_and_whole_numbers_must_be_equal():
    assert not same_line("rows 12 loss 1.0", "rows 6 loss 1.0")
    assert not same_line("right 3", "wrong 3")
    assert not same_line("torch.float32", "torch.float64")
    assert not same_line("nan", "0.5")
    assert not same_line("a 1 2", "a 1")


def test_the_scene_that_differs_is_named():
    one = ["== a", "loss 1.0", "== b", "loss 2.0", "== c", "x"]
    told = lines_differ(one, ["== a", "loss 1.0", "== b", "loss 2.5"])
    assert "b, line 1" in told and "c: not reached" in told and "a, line" not in told


def test_missing_extra_and_changed_files_are_seen(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        folder.mkdir()
        torch.save({"w": torch.ones(3)}, folder / "same.pt")
        (folder / "log.txt").write_text("loss 0.25\n")
    assert files_differ(one, many) == ""
    torch.save({"w": torch.ones(3) * 1.01}, many / "same.pt")
    (many / "log.txt").write_text("loss 0.26\n")
    (many / "more.txt").write_text("")
    (one / "gone.txt").write_text("")
    told = files_differ(one, many)
    assert all(name in told for name in ("same.pt", "log.txt", "more.txt", "gone.txt"))
