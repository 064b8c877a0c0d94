"""Clause 7, randomness: ranks share what they must share, and only that; a script's own seed means what it says.

Ranks are plain processes here, each with its rank and the run's seed: agreement needs no messages.
"""
# ruff: noqa: E501

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from running import environment, oars

DRIVER = """
import sys
from oars.plan import Plan
rank, seed, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if rank >= 0:
    from oars.adapt.python import random as oars_random
    from oars.adapt.python.seams import install_random
    install_random(rank, Plan(seed=seed))
    private = oars_random.Private(rank, seed)
import runpy
runpy.run_path(script, {"rank": rank, **({"private": private, "oars_random": oars_random} if rank >= 0 else {})}, "__main__")
"""


def run(tmp_path: Path, body: str, ranks: tuple[int, ...] = (0, 1), seed: int = 12345) -> list[str]:
    """What each rank prints; rank -1 is plain Python."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    environ = environment(PYTHONHASHSEED="0")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(rank), str(seed), str(script)],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
    outputs = []
    for process in started:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


DRAW = """
    import os, random, secrets, uuid
    import numpy as np, torch
    print(random.random(), np.random.rand(), torch.rand(2), torch.initial_seed())
    print(random.Random().random(), random.SystemRandom().random(), random.SystemRandom().randint(0, 10**9))
    random.seed(); print(random.random())
    np.random.seed(); print(np.random.rand())
    print(np.random.default_rng().random(), np.random.RandomState().rand(), np.random.SeedSequence().entropy)
    print(torch.seed(), torch.rand(1), uuid.uuid4(), uuid.uuid1(), os.urandom(5))
    print(secrets.token_hex(8), secrets.randbits(70), secrets.randbelow(10**9), secrets.choice(range(10**6)), secrets.token_urlsafe())
"""


def test_an_unseeded_script_is_one_draw_shared_by_all_ranks(tmp_path: Path) -> None:
    first, *others = run(tmp_path, DRAW)
    assert all(output == first for output in others)
    (other_run,) = run(tmp_path, DRAW, (0,), seed=54321)
    values = set(first.split()) & set(other_run.split())
    assert not {value for value in values if any(c.isdigit() for c in value)}


def test_a_script_that_seeds_itself_gets_exactly_its_own_numbers(tmp_path: Path) -> None:
    body = """
        import random
        import numpy as np, torch
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        print(random.random(), random.gauss(0, 1), np.random.randn(3), torch.randn(3), torch.randperm(9), random.sample(range(99), 5))
        print(random.Random(3).random(), random.Random("x").random(), np.random.default_rng(1).random(), np.random.RandomState(2).rand())
        print(torch.Generator().manual_seed(4).initial_seed(), torch.rand(2, generator=torch.Generator()))
        np.random.seed(seed=7); print(np.random.rand()); np.random.seed([1, 2]); print(np.random.rand())
        random.seed("word"); print(random.random()); random.seed(5, version=1); print(random.random())
        class Mine(random.Random): pass
        print(Mine(9).random(), isinstance(random._inst, random.Random))
    """
    plain, *ranks = run(tmp_path, body, (-1, 0, 1))
    assert ranks == [plain, plain]


def test_what_must_be_unique_stays_unique(tmp_path: Path) -> None:
    body = """
        import multiprocessing as mp, os, tempfile, threading
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=8); print(memory.name); memory.close(); memory.unlink()
        print(os.path.basename(tempfile.mktemp()), bytes(mp.current_process().authkey).hex())
        print(next(mp.synchronize.SemLock._rand))
        thread = threading.Thread(target=lambda: print(os.urandom(8).hex())); thread.start(); thread.join()
        import random; print("same", random.random())
    """
    outputs = [output.split() for output in run(tmp_path, "import multiprocessing.synchronize\n" + textwrap.dedent(body))]
    for one, other in zip(outputs, outputs[1:], strict=False):
        assert one[-2:] == other[-2:]
        assert all(a != b for a, b in zip(one[:-2], other[:-2], strict=True))


PRIVATE = """
    import random
    import numpy as np, torch
    {seeds}
    np.random.randn(1)  # leaves a spare Gaussian behind
    random.gauss(0, 1)
    before = oars_random.fingerprint()
    with private:
        print("own", random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(1), np.random.default_rng().random())
        with private:
            print("own", torch.rand(1))
        for _ in range(rank): random.random(), np.random.randn(), torch.rand(1), np.random.SeedSequence()
    assert oars_random.fingerprint() == before
    print("common", random.gauss(0, 1), np.random.randn(), torch.rand(1), np.random.default_rng().random())
    with private:
        print("own", random.random(), np.random.rand(), torch.rand(1))
    print("common", random.random(), np.random.rand(), torch.rand(1), oars_random.fingerprint().hex())
"""


def _lines(output: str, kind: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(kind)]


def test_private_streams_differ_between_ranks_and_leave_the_common_ones_alone(tmp_path: Path) -> None:
    outputs = run(tmp_path, PRIVATE.format(seeds=""))
    assert len({tuple(_lines(output, "common")) for output in outputs}) == 1
    for own in zip(*(_lines(output, "own") for output in outputs), strict=True):
        values = [set(line.split()[1:]) for line in own]
        assert not values[0] & values[1]
    assert run(tmp_path, PRIVATE.format(seeds="")) == outputs


def test_common_streams_are_those_of_one_process_around_private_ones(tmp_path: Path) -> None:
    seeds = "random.seed(0); np.random.seed(0); torch.manual_seed(0)"
    body = PRIVATE.format(seeds=seeds).replace("np.random.default_rng().random()", "0")
    plain = body.replace("oars_random.fingerprint()", "b''")
    plain = plain.replace("    with private:", "    if 0:").replace("        with private:", "        if 0:")
    (expected,) = run(tmp_path, plain, (-1,))
    for output in run(tmp_path, body):
        shown = [line.rpartition(" ")[0] for line in _lines(output, "common")]
        assert shown == [line.rpartition(" ")[0] for line in _lines(expected, "common")]


def test_same_script_seed_and_same_ranks_give_the_same_private_numbers_in_every_run(tmp_path: Path) -> None:
    body = PRIVATE.format(seeds="random.seed(0); np.random.seed(0); torch.manual_seed(0)")
    body = body.replace("np.random.default_rng().random()", "0")
    assert run(tmp_path, body, seed=1) == run(tmp_path, body, seed=2)


def test_fingerprints_tell_when_a_stream_has_been_drawn_from_unequally(tmp_path: Path) -> None:
    body = """
        import random
        import numpy as np, torch
        np.random.rand()
        print(oars_random.fingerprint().hex())
        (lambda: 0, random.random, np.random.rand, lambda: torch.rand(1))[rank]()
        print(oars_random.fingerprint().hex())
    """
    outputs = [output.split() for output in run(tmp_path, body, (0, 1, 2, 3))]
    assert len({before for before, _ in outputs}) == 1 and len({after for _, after in outputs}) == 4


def test_forked_loader_workers_draw_as_they_do_in_one_process(tmp_path: Path) -> None:
    body = """
        import os, random
        import numpy as np, torch
        from torch.utils.data import DataLoader, Dataset
        class D(Dataset):
            def __len__(self): return 6
            def __getitem__(self, i): return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        if __name__ == "__main__":
            torch.manual_seed(0)
            for batch in DataLoader(D(), 2, shuffle=True, num_workers=2): print(batch)
            class E(D):
                def __getitem__(self, i): return np.random.default_rng().random()
            drawn = torch.cat(list(DataLoader(E(), 2, num_workers=2)))
            print(len(set(drawn.tolist())))
    """
    plain, *ranks = run(tmp_path, body, (-1, 0, 1))
    assert ranks == [plain, plain]
    assert plain.endswith("\n6\n")


CLOCKS = """
import logging, pickle, sys, time

class Stamped:
    clock, local, pause = time.time, time.localtime, time.sleep

logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%Y")
logging.warning("logged")
print(Stamped().clock() > 0, Stamped().local(0).tm_year, Stamped().pause(0), pickle.loads(pickle.dumps(time.time)) is time.time)
"""


def test_clocks_that_a_class_has_do_not_become_its_methods(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CLOCKS)
    done = oars(tmp_path, "run", "--quiet", "-n", 2, "script.py", code=0)
    assert done.stdout.splitlines()[1:] == ["True 1970 None True"] and done.stdout.startswith("20"), done.stdout


def test_without_ranks_nothing_is_installed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import os, random, time, uuid
print(type(os.urandom).__name__, type(time.time).__name__, random.seed.__func__ is random.Random.seed,
      random.Random.seed.__module__, uuid.uuid4.__globals__ is vars(uuid))
""")
    done = oars(tmp_path, "run", "-n", "1", "--snapshot", "off", "--quiet", "script.py", code=0)
    assert done.stdout == "builtin_function_or_method builtin_function_or_method True random True\n"
