"""A script under ``oars run`` behaves as under ``python``: names, paths, pickles, children, input, output."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from running import environment


def python(tmp_path: Path, *args: str, **how) -> subprocess.CompletedProcess:
    how = {"input": "", "env": environment(), **how}
    return subprocess.run([sys.executable, *args], cwd=tmp_path, capture_output=True, text=True, timeout=60, **how)


def write(tmp_path: Path, text: str, name: str = "script.py") -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(textwrap.dedent(text))


def same(tmp_path: Path, *args: str, n: int = 2, **how) -> str:
    """Run under python and under oars, and return the output after checking that it is the same."""
    plain = python(tmp_path, *args, **how)
    ranked = python(tmp_path, "-m", "oars", "run", "-n", str(n), *args, **how)
    assert ranked.stdout == plain.stdout, ranked.stderr
    assert ranked.returncode == plain.returncode
    assert "".join(line + "\n" for line in ranked.stderr.splitlines() if not line.startswith("oars: ")) == plain.stderr
    return ranked.stdout


NAMES = """
    import os, pickle, sys, threading, time
    from helper import answer
    class Model: pass
    if __name__ == '__main__':
        main = sys.modules['__main__']
        print(sys.argv, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
        print(main.Model is Model, answer)
        print(sys.path[0], os.getcwd(), sorted(k for k in globals() if k.startswith('__')))
        print(type(pickle.loads(pickle.dumps(Model()))) is Model, pickle.dumps(Model()))
        hide = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURM_PROCID', 'SLURM_NTASKS')
        print([k for k in os.environ if k in hide or k.startswith(('OMPI_C', 'PMIX_R', 'PRTE'))])
        threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()
        print('err', file=sys.stderr)
"""


@pytest.mark.parametrize("n", [1, 2])
def test_a_script_finds_itself_as_under_python(tmp_path, n):
    write(tmp_path, NAMES, "deep/script.py")
    write(tmp_path, "answer = 42", "deep/helper.py")
    out = same(tmp_path, "deep/script.py", "-n", "7", "--help", "--", "x y", n=n)
    assert "thread" in out and "[]" in out


def test_ranks_cannot_be_told_from_the_environment(tmp_path):
    write(tmp_path, "import os; print([k for k in os.environ if k in ('RANK', 'SLURM_PROCID', 'SLURM_NTASKS')]);"
          "print(os.environ['SLURM_JOB_ID'], os.environ['OMPI_MCA_x'])")
    env = {**environment(), "RANK": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77",
           "OMPI_MCA_x": "y"}
    ranked = python(tmp_path, "-m", "oars", "run", "-n", "2", "script.py", env=env)
    assert ranked.stdout == "[]\n77 y\n", ranked.stderr


def test_modules_and_packages_run_with_dash_m(tmp_path):
    write(tmp_path, "", "pack/__init__.py")
    write(tmp_path, "answer = 42", "pack/helper.py")
    write(tmp_path, NAMES.replace("from helper", "from .helper"), "pack/train.py")
    write(tmp_path, "from . import train; print(__name__, __package__)", "pack/__main__.py")
    same(tmp_path, "-m", "pack.train", "-m", "--name", "x")
    same(tmp_path, "-m", "pack", n=1)


def test_children_find_the_script_and_are_no_ranks(tmp_path):
    write(tmp_path, """
        import multiprocessing, os, subprocess, sys
        def work(x):
            return x * x, __name__, sys.argv
        class Thing:
            value = 5
        def thing(queue):
            queue.put(Thing())
        if __name__ == '__main__':
            child = os.fork()
            if child == 0:
                sys.exit(7)
            print(os.waitpid(child, 0)[1] >> 8)
            for kind in ('spawn', 'fork'):
                context = multiprocessing.get_context(kind)
                with context.Pool(1) as pool:
                    print(pool.map(work, [3]))
                queue = context.Queue()
                context.Process(target=thing, args=(queue,)).start()
                print(type(queue.get()) is Thing)
            print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)
    """)
    same(tmp_path, "script.py", "a")


def test_files_that_are_open_at_the_end_are_written(tmp_path):
    write(tmp_path, """
        import csv, gzip, sys, threading, zipfile
        log = open('log.txt', 'w')
        table = csv.writer(open('table.csv', 'w'))
        packed, pages = gzip.open('log.gz', 'wt'), zipfile.ZipFile('pages.zip', 'w')
        class Last:
            def __init__(self, name):
                self.name = name
            def __del__(self):
                print(self.name)
        alone, ring, held = Last('alone'), Last('ring'), [Last('list')]
        held.append(held)
        ring.me, ring.file = ring, open('ring.txt', 'w')
        for file in (log, packed, ring.file):
            file.write('kept')
        table.writerow([1, 2])
        pages.writestr('page', 'kept')
        del ring
        if len(sys.argv) > 1:
            threading.Thread(target=lambda: __import__('time').sleep(60), daemon=True).start()
            sys.exit(int(sys.argv[1]))
    """)
    (tmp_path / "oars-runs").mkdir()
    for args in ([], ["3"]):
        run = python(tmp_path, "-m", "oars", "run", "--quiet", "-n", "2", "script.py", *args)
        assert run.returncode == int(args[0] if args else 0), run.stderr
        assert [(tmp_path / name).read_text() for name in ("log.txt", "ring.txt", "table.csv")] == [
            "kept", "kept", "1,2\n"]
        if not args:
            assert run.stdout == "ring\nalone\nlist\n"
            assert zipfile.ZipFile(tmp_path / "pages.zip").read("page") == b"kept"
            assert gzip.open(tmp_path / "log.gz").read() == b"kept"
        for path in tmp_path.glob("*.[tcgz]*"):
            path.unlink()


def test_a_script_that_starts_ranks_itself_is_told_what_to_delete(tmp_path):
    write(tmp_path, """
        import sys
        import torch.multiprocessing as mp
        from torch.distributed import init_process_group
        def rank(number, size):
            open(f'{sys.argv[1]}/{number}', 'w').close()
            init_process_group('gloo', f'file://{sys.argv[1]}/meet', rank=number, world_size=size)
        if __name__ == '__main__':
            try:
                init_process_group('gloo')
            except ValueError:
                print('not one of many')
            mp.spawn(rank, (1,), nprocs=1)
    """)
    run = python(tmp_path, "-m", "oars", "run", "-n", "2", "script.py", str(tmp_path))
    told = [line for line in run.stderr.splitlines() if "delete init_process_group" in line]
    assert run.stdout == "not one of many\n" and run.returncode == 1
    assert len(told) == 2 and "Traceback" not in run.stderr
    assert (tmp_path / "0").exists() and not (tmp_path / "meet").exists()  # it may spawn, but not make groups


INPUT = """
    import sys
    name = input('name? ')
    print(repr(name), repr(sys.stdin.readline()), repr(sys.stdin.read(2)), sys.stdin.isatty())
    for line in sys.stdin:
        print(repr(line))
    try:
        input()
    except EOFError:
        print('end')
    import os
    with open(os.environ.get('OARS_RUN_FOLDER', '.') + '/heard-%d' % os.getpid(), 'w') as f:
        f.write(name)
    import matplotlib
    matplotlib.use('module://window')
    from matplotlib import pyplot
    pyplot.plot([1, 2])
    print(pyplot.show(), pyplot.waitforbuttonpress())
"""
WINDOW = """
    import os
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    def show(*args, **kw):
        os.mkdir(os.environ.get('OARS_RUN_FOLDER', '.') + '/seen-show-%d' % os.getpid())
    class FigureCanvas(FigureCanvasAgg):
        def start_event_loop(self, timeout=0):
            os.mkdir(os.environ.get('OARS_RUN_FOLDER', '.') + '/seen-wait-%d' % os.getpid())
"""


def test_every_rank_hears_the_same_input(tmp_path):
    write(tmp_path, INPUT)
    write(tmp_path, WINDOW, "window.py")
    out = same(tmp_path, "script.py", n=2, input="Ada\nLovelace\nabcd\nlast é")
    assert "'Ada'" in out and "last é" in out and out.endswith("end\nNone None\n")
    heard = [path.read_text() for path in (tmp_path / "oars-runs").glob("*/heard-*")]
    assert heard == ["Ada", "Ada"]
    assert len(list((tmp_path / "oars-runs").glob("*/seen-*"))) == 2  # a figure's window is the first rank's
    (tmp_path / "input.txt").write_text("Bob\nB\ncde\n")
    with open(tmp_path / "input.txt") as file:
        done = python(tmp_path, "-m", "oars", "run", "-n", "2", "script.py", input=None, stdin=file)
    assert "'Bob'" in done.stdout and done.returncode == 0, done.stderr


def test_no_input_is_the_end_of_input(tmp_path):
    write(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    done = python(tmp_path, "-m", "oars", "run", "-n", "2", "script.py", input=None, stdin=subprocess.DEVNULL)
    assert done.stdout == "''\n"


def test_output_is_shown_once_and_kept_for_every_rank(tmp_path):
    write(tmp_path, """
        import os, sys
        print('out')
        print('part', end='', flush=True)
        sys.stderr.write('bar\\rbar 2')
        os.system('echo from a child')
        os.write(1, bytes([0, 255, 10]))
    """)
    done = subprocess.run([sys.executable, "-m", "oars", "run", "-n", "2", "--name", "r", "script.py"], cwd=tmp_path,
                          env=environment(), capture_output=True)
    folder = tmp_path / "oars-runs" / "r"
    assert done.stdout == b"out\npartfrom a child\n\0\xff\n"
    assert done.stderr.startswith(b"bar\rbar 2\noars: 2 ranks, 0 steps, oars-runs/r\noars: nothing was split: ")
    assert (folder / "rank-0.log").read_bytes() == (folder / "rank-1.log").read_bytes() == done.stdout
    assert (folder / "rank-1.err").read_bytes() == b"bar\rbar 2"
    assert sorted(path.name for path in folder.iterdir() if not path.is_dir()) == [
        "end.json", "mpirun.log", "rank-0.err", "rank-0.log", "rank-1.err", "rank-1.log", "run.json", "summary.json"]


def test_ranks_share_the_cores(tmp_path):
    write(tmp_path, "import os; print(len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], "
          "os.environ['PYTHONHASHSEED'])")
    cores = len(os.sched_getaffinity(0))
    env = {key: value for key, value in environment().items() if key not in ("OMP_NUM_THREADS", "PYTHONHASHSEED")}
    done = python(tmp_path, "-m", "oars", "run", "-n", str(cores), "--name", "a", "script.py", env=env)
    seed = json.loads((tmp_path / "oars-runs/a/run.json").read_text())["seed"]
    assert done.stdout == f"1 1 {seed}\n", done.stderr
    done = python(tmp_path, "-m", "oars", "run", "-n", str(cores + 1), "script.py",
                  env={**env, "OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "4"})
    assert done.stdout == f"{cores} 3 4\n", done.stderr


def test_gpus_are_given_by_local_rank(tmp_path):
    write(tmp_path, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    env = {**environment(), "CUDA_VISIBLE_DEVICES": "4,GPU-abc"}
    done = python(tmp_path, "-m", "oars", "run", "--name", "two", "script.py", env=env)
    assert done.stdout == "4\n"
    assert (tmp_path / "oars-runs/two/rank-1.log").read_text() == "GPU-abc\n"
    done = python(tmp_path, "-m", "oars", "run", "-n", "3", "script.py", env=env)
    assert done.returncode == 2 and done.stderr.startswith("oars: 3 ranks but 2 GPUs here: ")
    python(tmp_path, "-m", "oars", "run", "-n", "3", "--share-gpus", "--name", "three", "script.py", env=env)
    assert (tmp_path / "oars-runs/three/rank-2.log").read_text() == "4\n"


def test_the_plan_says_what_was_run(tmp_path):
    write(tmp_path, "")
    python(tmp_path, "-m", "oars", "run", "-n", "1", "--name", "p", "--batch", "keep", "--scale-lr", "sqrt",
           "script.py", "--epochs", "3")
    plan = json.loads((tmp_path / "oars-runs/p/run.json").read_text())
    expected = {"script": "script.py", "args": ["--epochs", "3"], "module": False, "ranks": 1, "batch": "keep",
                "scale_lr": "sqrt", "local_batchnorm": True, "share_gpus": False, "cwd": str(tmp_path)}
    assert {key: plan[key] for key in expected} == expected
    assert plan["versions"]["python"].startswith("3.")


def test_with_batch_keep_a_rank_for_which_no_batch_is_left_takes_part(tmp_path):
    """20 samples in batches of 8 are three: of four ranks one has none. All are one batch of 20 to the script."""
    write(tmp_path, """
        import sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True):
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(len(x), round(loss.item(), 5))
        """)
    kept = python(tmp_path, "-m", "oars", "run", "-n", "4", "--batch", "keep", "script.py", "8")
    assert kept.stdout == python(tmp_path, "script.py", "20").stdout != "", kept.stderr


def test_local_batchnorm_takes_each_ranks_own_rows(tmp_path):
    """Against the same done by hand in one process: slices normalised apart, their running statistics averaged."""
    write(tmp_path, """
        import sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(26, 3), torch.randn(26, 1))
        before, norm, after = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        model = torch.nn.Sequential(before, norm, after)

        def by_hand(x):
            running, parts = [], []
            for part in x.tensor_split(2):
                kept = [norm.running_mean.clone(), norm.running_var.clone()]
                parts.append(torch.nn.functional.batch_norm(before(part), *kept, norm.weight, norm.bias, True, 0.1))
                running.append(torch.stack(kept))
            mean, var = torch.stack(running).mean(0)
            norm.running_mean, norm.running_var = mean, var
            return after(torch.cat(parts))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=8, shuffle=True):  # the last has 2: one row a rank would not do
                if len(x) < 4:
                    continue
                loss = torch.nn.functional.mse_loss((model if len(sys.argv) < 2 else by_hand)(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"{loss.item():.5f}")
        for value in (norm.running_mean, norm.running_var, norm.weight, after.weight):
            print([f"{v:.4f}" for v in value.flatten().tolist()])
        """)
    local = python(tmp_path, "-m", "oars", "run", "-n", "2", "--local-batchnorm", "script.py")
    assert local.stdout == python(tmp_path, "script.py", "by hand").stdout != "", local.stderr
    assert local.stdout != python(tmp_path, "script.py").stdout, "a global batch's statistics are others"


def test_a_loader_with_persistent_workers_goes_without_the_garbage_collector(tmp_path):
    """In a circle its workers would be waited for, 5 s each."""
    write(tmp_path, """
        import gc, torch, weakref
        from torch.utils.data import DataLoader, TensorDataset
        gc.disable()
        loader = DataLoader(TensorDataset(torch.arange(12.)), 4, num_workers=1, persistent_workers=True)
        print([x.tolist() for (x,) in loader])
        gone = weakref.ref(loader._iterator)
        del loader
        print(gone())
        """)
    assert same(tmp_path, "script.py").endswith("None\n")


def test_output_and_errors_keep_their_order_where_they_meet(tmp_path):
    write(tmp_path, """
        import sys
        for i in range(500):
            print(i, file=sys.stderr if i % 3 else sys.stdout)
        1 / 0
    """)
    done = subprocess.run([sys.executable, "-m", "oars", "run", "-n", "2", "script.py"], cwd=tmp_path,
                          env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told = done.stdout.splitlines()
    assert told[:500] == [str(i) for i in range(500)]
    assert [line.split(":")[0] for line in told[500:]][-3:] == ["ZeroDivisionError", "oars", "oars"]
    assert told[500].startswith("Traceback") and done.stdout.count("Traceback") == 1
