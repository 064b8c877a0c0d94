"""The parts of snapshots: files that are whole or refused, the tape, stand-ins, what is found and what is kept."""

from __future__ import annotations

import copy
import math
import os
import random
import resource
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from one_snapshot import a_snapshot
from running import SOURCE

import oars
from oars import kept
from oars.adapt.replay import snapshot_file, streams
from oars.adapt.replay.snapshot_file import Blob, Refused, decode, encode, newest, read
from oars.adapt.replay.tape import Damaged, Diverged, Tape, TooLarge, read_tape
from oars.adapt.torch.replay import placeholder
from oars.commands.planning import job_end, snapshot_plan
from oars.runfolder import UsageError


def good(folder: Path) -> tuple[str | None, list[str]]:
    path, refused = newest(folder, lambda header: None)
    return path.name if path else None, refused


def test_a_snapshot_cut_at_any_byte_is_refused_and_the_one_before_is_used(tmp_path):
    a_snapshot(tmp_path, 1)
    second = a_snapshot(tmp_path, 2)
    data = second.read_bytes()
    header = 24 + int.from_bytes(data[16:24], "little")
    cuts = [*range(header + 1), *range(header + 1, len(data), 97), len(data) - 32, len(data) - 1]
    for length in cuts:
        second.write_bytes(data[:length])
        name, refused = good(tmp_path)
        assert name == "00000001.snap" and refused[0].startswith("the snapshot of step 2 is refused: "), length
    second.write_bytes(data + b"x")
    assert good(tmp_path)[0] == "00000001.snap"
    second.write_bytes(data)
    assert good(tmp_path) == ("00000002.snap", [])


def test_a_flipped_byte_is_refused(tmp_path):
    path = a_snapshot(tmp_path, 1)
    data = bytearray(path.read_bytes())
    for at in [*range(0, 64), *range(64, len(data), 53), len(data) - 1]:
        data[at] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(Damaged):
            read(path)
        data[at] ^= 0x10
    path.write_bytes(data)
    header, blobs = read(path)
    value = decode(header["state"], [b.data.view(b.dtype).reshape(b.shape) for b in blobs])
    assert value["w"].tolist() == list(range(300)) and value["empty"].shape == (0, 3)


def test_two_are_kept_and_what_a_killed_writer_left_is_removed(tmp_path):
    a_snapshot(tmp_path, 1)
    (tmp_path / "snapshots/.00000002.77.part").write_text("half")
    for step in (3, 20, 100):
        a_snapshot(tmp_path, step)
    assert sorted(os.listdir(tmp_path / "snapshots")) == ["00000020.snap", "00000100.snap"]


def test_a_full_disk_leaves_the_snapshot_before_as_it_was(tmp_path):
    first = a_snapshot(tmp_path, 1)
    data = first.read_bytes()
    code = f"""
        import sys; sys.path[:0] = [{SOURCE!r}, {str(Path(__file__).parent)!r}]
        from pathlib import Path
        from one_snapshot import a_snapshot
        a_snapshot(Path({str(tmp_path)!r}), 2)
    """
    small = (2000, 2000)
    done = subprocess.run([sys.executable, "-c", "\n".join(map(str.strip, code.splitlines()))], text=True,
                          capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, small))
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert os.listdir(tmp_path / "snapshots") == ["00000001.snap"] and first.read_bytes() == data


def test_values_come_back_as_they_were_and_foreign_ones_are_refused_by_name():
    value = {"a": (1, 2.5, None, True), 3: {"x": {1, 2}, "$y": b"raw"}, "o": OrderedDict(b=1, a=2),
             "d": deque([1, 2], maxlen=3), "c": 1 + 2j, "n": np.float32(0.1), "big": 1 << 80, "nan": math.inf}
    blobs: list[Blob] = []
    coded = encode(value, blobs, "state")
    back = decode(coded, [])
    assert back == value and type(back["o"]) is OrderedDict and back["d"].maxlen == 3
    assert type(back["n"]) is np.float32
    with pytest.raises(Refused, match=r"state\['hook'\]\[1\] is a builtins.function, which a snapshot cannot hold"):
        encode({"hook": [1, lambda: 2]}, [], "state")


def test_a_snapshot_is_no_pickle(tmp_path):
    source = Path(snapshot_file.__file__).read_text() + Path(sys.modules[Tape.__module__].__file__ or "").read_text()
    assert "pickle" not in source and "eval(" not in source and "exec(" not in source


# ---- the tape --------------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_played_and_another_course_is_noticed(tmp_path):
    tape = Tape()
    tape.begin(tmp_path, voice=True)
    given = [0.1, True, False, 7, -(1 << 70), 1j, np.arange(6).reshape(2, 3), np.zeros(1 << 16)]
    for value in given:
        tape.put_value(value)
    for _ in range(3):
        tape.put_kind(b"c", ("T", "float32", (2, 3), "cpu", True))
    mark, _ = tape.mark() or ({}, None)
    tape.put_value(2.0)
    tape.flush()
    played = Tape()
    played.begin(tmp_path, voice=True, mark=mark)
    back = [played.take_value() for _ in given]
    assert back[:6] == given[:6] and back[6].tolist() == given[6].tolist() and back[7] is TooLarge
    assert played.take_kind("c") == ["T", "float32", [2, 3], "cpu", True]
    with pytest.raises(Diverged, match="it read a value where, the first time, it called a model"):
        played.take_value()
    assert [played.take_kind("c")[0] for _ in range(2)] == ["T", "T"] and played.played_out()
    with pytest.raises(Diverged, match="the snapshot was taken before"):
        played.take("s")
    played.played_to()  # records on from there, and the rest is gone
    played.put_value(3.0)
    mark2, _ = played.mark() or ({}, None)
    assert len(read_tape(tmp_path, mark2)) == (tmp_path / "snapshots/tape").stat().st_size
    third = Tape()
    third.begin(tmp_path, voice=False, mark=mark2)
    for _ in given:
        third.take_value()
    assert [third.take_kind("c")[0] for _ in range(3)] == ["T"] * 3 and third.take_value() == 3.0


def test_a_damaged_tape_is_refused(tmp_path):
    tape = Tape()
    tape.begin(tmp_path, voice=True)
    for i in range(100):
        tape.put_value(float(i))
    mark, _ = tape.mark() or ({}, None)
    path = tmp_path / "snapshots/tape"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(Damaged, match="cut short"):
        read_tape(tmp_path, mark)
    path.write_bytes(data[:50] + b"?" + data[51:])
    with pytest.raises(Damaged, match="changed"):
        read_tape(tmp_path, mark)


def test_a_new_voice_writes_what_the_dead_one_may_not_have_written(tmp_path):
    voice, other = Tape(), Tape()
    voice.begin(tmp_path, voice=True)
    other.begin(tmp_path, voice=False)
    for tape in (voice, other):
        tape.put_value(1.0)
        tape.flush()
        tape.put_value(2.0)
    os.truncate(tmp_path / "snapshots/tape", 3)
    other.become_voice()
    mark, _ = other.mark() or ({}, None)
    assert len(read_tape(tmp_path, mark)) == len(b"OARSTAPE1\n") + 18


@pytest.mark.parametrize(("stream", "draw"), [
    ("python", random.random), ("python", lambda: random.gauss(0, 1)), ("numpy", np.random.rand),
    ("torch", lambda: torch.rand(1)), ("torch", lambda: torch.randn(1))])
def test_a_glance_at_a_stream_sees_every_draw(stream, draw):
    """Looking into the generators' own memory; normal numbers come in pairs, of which the second is kept."""
    cells = streams.Streams().all()[stream].cells
    assert len(cells) > 1 or stream == "numpy"
    assert not isinstance(cells[0], streams.Stream), "its memory was not found: every glance takes all of it"
    seen = set()
    for _ in range(5):
        seen.add(tuple(cell.value for cell in cells))
        draw()
    assert len(seen) == 5


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_streams_stand_where_they_stood_after_what_was_passed_over(tmp_path, monkeypatch, name):
    def draw() -> float:
        return {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1).item()}[name]()

    def course(passed_over: int) -> list[float]:
        """Regions draw, and the script draws in between; a last region moves a stream that nobody asks any more."""
        found = []
        for count in (0, 1, 700, 3):
            (here.enter if passed_over else here.play)()
            for _ in range(count * passed_over):
                draw()
            if passed_over:
                tape.put(b"s")
                here.leave()
            else:
                tape.take("s")
                here.play()
            found.append(draw())
        return found

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    tape, here = Tape(), streams.Streams()
    monkeypatch.setattr(streams, "tape", tape)
    tape.begin(tmp_path, voice=True)
    here.begun = True
    first = course(1)
    here.enter()
    mark, _ = tape.mark() or ({}, None)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    tape, here = Tape(), streams.Streams()
    monkeypatch.setattr(streams, "tape", tape)
    tape.begin(tmp_path, voice=False, mark=mark)
    assert course(0) == first


# ---- when, and what is kept ------------------------------------------------------------------------------------------


def test_periods_and_the_end_of_a_job(monkeypatch, tmp_path):
    for name in ("SLURM_JOB_END_TIME", "COBALT_ENDTIME", "PBS_WALLTIME"):
        monkeypatch.delenv(name, raising=False)
    assert snapshot_plan("10m") == {"seconds": 600} and snapshot_plan("1.5h") == {"seconds": 5400}
    assert snapshot_plan("30s") == {"seconds": 30} and snapshot_plan("100steps") == {"steps": 100}
    assert snapshot_plan(None) == {} and snapshot_plan("off") is None
    for wrong in ("10", "m", "0s", "-3s", "10 m", "ten"):
        with pytest.raises(UsageError, match="is not a period: use 30s, 10m, 2h, 100steps, or off"):
            snapshot_plan(wrong)
    monkeypatch.setenv("PBS_WALLTIME", "3600")
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\n")
    os.utime(nodes, (1000, 1000))
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    assert job_end() == 4600
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456000")
    assert snapshot_plan("10m") == {"seconds": 600, "end": 1893456000}


def test_keep_takes_what_can_be_put_back_in_place(monkeypatch):
    monkeypatch.setattr(kept, "kept", [])

    class Counter:
        n = 3

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    history, table, counter = oars.keep([1]), oars.keep({"a": 1}), oars.keep(Counter())
    assert oars.keep(history) is history and len(kept.kept) == 3
    states = [s.copy() for s in kept.states()]
    history.append(2), table.clear()
    counter.n = 9
    kept.restore(states)
    assert (history, table, counter.n) == ([1], {"a": 1}, 3)
    with pytest.raises(TypeError, match="oars.keep takes a dict, a list, or an object with state_dict"):
        oars.keep(3)  # type: ignore[type-var]


# ---- stand-ins -------------------------------------------------------------------------------------------------------


@pytest.fixture
def playing(monkeypatch):
    for name, value in {"playing": True, "skips": True, "busy": 0}.items():
        monkeypatch.setattr(placeholder.tape, name, value)
    mode = placeholder.Playing()
    mode.__enter__()
    yield
    placeholder.leave_mode(mode)
    placeholder.stale.clear()
    placeholder.unsure.clear()


OPERATIONS = [
    lambda x, y: x + 1, lambda x, y: x @ x.T, lambda x, y: x.softmax(1).max(1).values, lambda x, y: x[:, 1:].clone(),
    lambda x, y: torch.cat([x, torch.zeros(2, x.shape[1])]), lambda x, y: F.cross_entropy(x, y),
    lambda x, y: x.argmax(1) == y,
    lambda x, y: x.double().sum(), lambda x, y: x.reshape(-1, 2).mean(0, keepdim=True), lambda x, y: x.topk(2).indices,
    lambda x, y: torch.where(x > 0, x, 0), lambda x, y: x.to(torch.float64), lambda x, y: F.one_hot(y, 5).float(),
    lambda x, y: torch.stack(list(x)), lambda x, y: x.std(1), lambda x, y: torch.einsum("ij,kj->ik", x, x),
    lambda x, y: x.new_zeros(3), lambda x, y: torch.randn_like(x), lambda x, y: x.T, lambda x, y: x.data,
    lambda x, y: F.dropout(x, 0.5), lambda x, y: x.gather(1, y[:, None]), lambda x, y: torch.linalg.vector_norm(x),
    lambda x, y: x.expand(3, *x.shape), lambda x, y: torch.tensor([x.sum(), x.mean()]),
]


@pytest.mark.parametrize("wide", [1, 20_000], ids=["worked on", "by shapes alone"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_made_of_a_stand_in_has_the_shape_of_the_real_thing(playing, operation, wide):
    shape = (6, 5) if wide == 1 else (6, 5 * wide)
    placeholder.tape.playing = False
    real = operation(torch.rand(shape), torch.arange(6) % 5)
    placeholder.tape.playing = True
    made = operation(placeholder.StandIn(shape, torch.float32), placeholder.StandIn((6,), torch.int64))
    assert (made.shape, made.dtype, made.device) == (real.shape, real.dtype, real.device)


def test_a_plain_tensor_changed_by_a_stand_in_is_stale_with_its_views_until_it_is_overwritten(playing):
    total, table = torch.zeros(()), torch.zeros(3, 3)
    row, other = table[1], torch.zeros(2)
    total += placeholder.StandIn((), torch.float32)
    table.data[0, 0] = placeholder.StandIn((), torch.float32)
    assert all(map(placeholder.is_tainted, (total, table, row))) and not placeholder.is_tainted(other)
    assert isinstance(total * 2, placeholder.StandIn) and isinstance(row.sum(), placeholder.StandIn)
    total.zero_()
    assert not placeholder.is_tainted(total) and not isinstance(total * 2, placeholder.StandIn)
    weight = torch.nn.Parameter(torch.ones(2))
    placeholder.mark_stale(weight)
    assert isinstance(weight.detach() + 1, placeholder.StandIn)
    assert type(copy.deepcopy({"w": weight.data})["w"]) is placeholder.StandIn


def test_after_the_snapshots_place_a_stand_in_has_its_values_or_refuses(playing, monkeypatch):
    kept_one = placeholder.StandIn((2,), torch.float32, requires_grad=True)
    lost, stale = placeholder.StandIn((2,), torch.float32), torch.zeros(2)
    placeholder.mark_stale(stale)
    monkeypatch.setattr(placeholder.tape, "playing", False)
    assert placeholder.fill(kept_one, torch.tensor([1.0, 2.0]))
    assert (kept_one + 1).tolist() == [2, 3] and kept_one.detach().numpy().tolist() == [1, 2]
    assert lost.shape == (2,)
    for wrong in (lost, stale):
        with pytest.raises(Diverged, match="uses a tensor made before the snapshot that the snapshot does not have"):
            wrong + 1
    with pytest.raises(Diverged, match="the script needs a gradient of a tensor from before the snapshot"):
        (kept_one * 2).sum().backward()
    assert not placeholder.fill(lost, torch.zeros(3))
    assert placeholder.fill(stale, torch.ones(2)) and (stale + 1).tolist() == [2, 2]
