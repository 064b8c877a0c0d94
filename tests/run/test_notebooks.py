"""A notebook runs on ranks as a script does, and its executed copy is that of one process. All ranks are real."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import struct
from pathlib import Path

import nbformat
import pytest
from running import Run, oars, wait_for

DATA = """\
import os, time
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(128, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)"""
TRAIN = """\
losses = []
for epoch in range(4):
    for a, b in loader:
        loss = (model(a) - b).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        time.sleep(float(os.environ.get("SLOW", "0")))
    print(f"epoch {epoch} loss {losses[-1]:.4f}")"""
PLOT = "import matplotlib.pyplot as plt\nplt.plot(losses)\nplt.show()\nplt.plot([1, 2]);"
VALUES = "f'{len(losses)} losses, the last {losses[-1]:.4f}'"


def write(path: Path, *cells: str, **tags: list[str]) -> Path:
    """A notebook with these cells of code; ``c1=["raises-exception"]``: the tags of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [{"cell_type": "code", "id": f"c{i}", "metadata": {"tags": tags.get(f"c{i}", [])}, "source": cell,
             "outputs": [{"output_type": "stream", "name": "stdout", "text": "old"}], "execution_count": 9}
            for i, cell in enumerate(cells)]
    text = {"cell_type": "markdown", "id": "text", "metadata": {}, "source": ["# A title\n", "and text"]}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": [text, *made],
                                "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}}}))
    return path


def cells_of(copy: Path) -> list[dict]:
    """The cells of code of an executed copy, which is checked as Jupyter would check it."""
    notebook = json.loads(copy.read_text())
    nbformat.validate(notebook)
    assert notebook["cells"][0]["source"] == ["# A title\n", "and text"]
    return notebook["cells"][1:]


def shown(cell: dict) -> list[str]:
    """A cell's outputs as text; a picture as its size."""
    return [output.get("text") or output.get("evalue") or size_of(output["data"].get("image/png"))
            or output["data"]["text/plain"] for output in cell["outputs"]]


def size_of(png: str | None) -> str:
    return "{}x{}".format(*struct.unpack(">II", base64.b64decode(png)[16:24])) if png else ""


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The training notebook on one rank: its cells."""
    folder = tmp_path_factory.mktemp("one")
    write(folder / "train.ipynb", DATA, TRAIN, PLOT, VALUES)
    oars(folder, "run", "-n", "1", "--name", "it", "train.ipynb", code=0)
    return [shown(cell) for cell in cells_of(folder / "oars-runs/it/train.ipynb")]


def test_a_notebook_on_two_ranks_shows_what_it_shows_on_one(tmp_path, one):
    notebook = write(tmp_path / "train.ipynb", DATA, TRAIN, PLOT, VALUES)
    before = notebook.read_bytes()
    run = Run(tmp_path, "-n", "2", "train.ipynb")
    assert run.code == 0, run
    cells = cells_of(run.folder / "train.ipynb")
    assert [shown(cell) for cell in cells] == one and [cell["execution_count"] for cell in cells] == [1, 2, 3, 4]
    assert one[1] == ["".join(line + "\n" for line in run.lines if line.startswith("epoch"))]
    assert all(re.fullmatch(r"\d{3}x\d{3}", size) for size in one[2]) and len(one[2]) == 2
    assert one[3][0].startswith("'16 losses")
    assert run.summary["split_steps"] == run.summary["steps"] == 16
    assert notebook.read_bytes() == before
    assert "the executed notebook: oars-runs/it/train.ipynb" in run.err


def test_an_error_is_at_its_cell_and_in_the_copy(tmp_path):
    write(tmp_path / "bad.ipynb", "print('begins')", "def half(n):\n    return 1 / n\nhalf(0)", "print('never')")
    done = oars(tmp_path, "run", "-n", "2", "--name", "it", "bad.ipynb")
    assert (done.returncode, done.stdout) == (1, "begins\n")
    assert f'File "{tmp_path}/bad.ipynb, cell 2", line 2, in half\n    return 1 / n\n' in done.stderr
    assert "site-packages" not in done.stderr and "oars/rank" not in done.stderr
    first, second, third = cells_of(tmp_path / "oars-runs/it/bad.ipynb")
    assert shown(first) == ["begins\n"] and third["outputs"] == [] and third["execution_count"] is None
    assert [(o["ename"], o["evalue"]) for o in second["outputs"]] == [("ZeroDivisionError", "division by zero")]
    assert "bad.ipynb, cell 2" in re.sub(r"\x1b\[[\d;]*m", "", "\n".join(second["outputs"][0]["traceback"]))


def test_cells_may_be_expected_to_fail_or_left_out_and_sys_exit_ends_the_notebook(tmp_path):
    write(tmp_path / "tags.ipynb", "1 / 0", "never", " ", "import sys\nprint('on')\nsys.exit(3)", "print('never')",
          c0=["raises-exception"], c1=["skip-execution"])
    done = oars(tmp_path, "run", "-n", "2", "--name", "it", "tags.ipynb")
    assert (done.returncode, done.stdout) == (3, "on\n"), done.stderr
    cells = cells_of(tmp_path / "oars-runs/it/tags.ipynb")
    assert [shown(cell) for cell in cells] == [["division by zero"], [], [], ["on\n"], []]
    assert [cell["execution_count"] for cell in cells] == [1, None, None, 2, None]


def test_magics_shell_commands_displays_and_awaits_work_in_the_notebooks_folder(tmp_path):
    write(tmp_path / "sub/all.ipynb",
          "import os, sys, helper\nprint(sys.argv[1:], os.path.basename(os.getcwd()), __name__, helper.NAME)",
          "%%time\n!echo from a shell",
          "from IPython.display import HTML, clear_output\n"
          "print('gone')\nclear_output()\nhandle = display(HTML('<b>1</b>'), display_id=True)",
          "handle.update(HTML('<b>2</b>'))\nimport asyncio\nawait asyncio.sleep(0.01)\n"
          "print('waited', file=sys.stderr)",
          "open('made.txt', 'w').write('by the voice')")
    (tmp_path / "sub/helper.py").write_text("NAME = 'helper'\n")
    done = oars(tmp_path, "run", "-n", "2", "--name", "it", "sub/all.ipynb", "--lr", "3", code=0)
    cells = cells_of(tmp_path / "oars-runs/it/all.ipynb")
    assert shown(cells[0]) == ["['--lr', '3'] sub __main__ helper\n"]
    assert "from a shell" in shown(cells[1])[0] and "Wall time" in shown(cells[1])[0]
    assert [output["data"]["text/html"] for output in cells[2]["outputs"]] == ["<b>2</b>"]
    assert [(o["name"], o["text"]) for o in cells[3]["outputs"]] == [("stderr", "waited\n")]
    assert shown(cells[4]) == ["12"] and (tmp_path / "sub/made.txt").read_text() == "by the voice"
    assert "from a shell" in done.stdout and "waited" in done.stderr


def test_a_cell_that_takes_too_long_ends_the_run_with_one_line(tmp_path):
    write(tmp_path / "slow.ipynb", "print('begins')\nimport time", "print('sleeps')\ntime.sleep(60)", "print('never')")
    done = oars(tmp_path, "run", "-n", "2", "--name", "it", "--cell-timeout", "2", "slow.ipynb")
    text = "cell 2 of slow.ipynb took longer than --cell-timeout 2"
    assert (done.returncode, done.stdout) == (2, "begins\nsleeps\n")
    assert done.stderr == f"oars: {text}; what it has shown is in oars-runs/it/slow.ipynb\n"
    cells = cells_of(tmp_path / "oars-runs/it/slow.ipynb")
    assert [shown(cell) for cell in cells] == [["begins\n"], ["sleeps\n", text], []]


def test_the_copy_is_whole_if_the_voice_dies(tmp_path, one):
    write(tmp_path / "train.ipynb", DATA, TRAIN, PLOT, VALUES)
    run = Run(tmp_path, "-n", "2", "train.ipynb", deaths=[[0, "backward", 6]])
    assert run.code == 0, run
    assert run.summary["losses"] == 1
    assert [shown(cell) for cell in cells_of(run.folder / "train.ipynb")] == one


def test_the_copy_of_a_resumed_run_is_whole(tmp_path, one):
    write(tmp_path / "train.ipynb", DATA, TRAIN, PLOT, VALUES)
    run = Run(tmp_path, "-n", "2", "--snapshot", "6steps", "train.ipynb", SLOW="0.1")
    wait_for(lambda: list(run.folder.glob("snapshots/*.snap")), "a snapshot")
    for rank in (0, 1):
        run.kill(rank)
    assert run.code != 0
    assert [len(shown(cell)) for cell in cells_of(run.folder / "train.ipynb")] == [0, 0, 0, 0]
    done = oars(tmp_path, "resume", "it", code=0)
    assert "continuing from the snapshot of step" in done.stderr
    assert [shown(cell) for cell in cells_of(run.folder / "train.ipynb")] == one
    assert done.stdout.count("epoch") < 4  # what it had said before is not said again


def test_verify_compares_a_notebook_on_one_rank_and_on_two(tmp_path):
    write(tmp_path / "train.ipynb", DATA, TRAIN, PLOT, VALUES)
    done = oars(tmp_path, "verify", "-n", "2", "--steps", "5", "train.ipynb", code=0)
    assert done.stdout.startswith("oars: same training on 1 and 2 ranks: over 5 steps")


def test_an_interrupt_is_at_its_cell(tmp_path):
    write(tmp_path / "slow.ipynb", "import time", "print('sleeps', flush=True)\ntime.sleep(60)", "print('never')")
    run = Run(tmp_path, "-n", "2", "slow.ipynb")
    wait_for(lambda: "sleeps" in (run.folder / "rank-0.log").read_text() if (run.folder / "rank-0.log").exists()
             else False, "the cell")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.code == 130, run
    assert "slow.ipynb, cell 2" in run.err
    cells = cells_of(run.folder / "slow.ipynb")
    assert [output["output_type"] for output in cells[1]["outputs"]] == ["stream", "error"]


@pytest.mark.parametrize(("text", "says"), [
    ("", "is no notebook: Expecting value: line 1 column 1 (char 0)"),
    ("{}", "is no notebook: it has no nbformat"),
    ('{"nbformat": 3}', "is a notebook of format 3, and format 4 is read: open it in Jupyter and save it"),
    ('{"nbformat": 4, "cells": 1}', "is no notebook: it has no list of cells"),
    ('{"nbformat": 4, "cells": [], "metadata": {"kernelspec": {"language": "R"}}}',
     "is a notebook of R: oars runs those of Python"),
    ('{"nbformat": 4, "cells": [], "metadata": [1]}', "is no notebook: its metadata are no tables"),
    ('{"nbformat": 4, "cells": [], "metadata": {"kernelspec": "R"}}', "is no notebook: its metadata are no tables"),
    ('{"nbformat": 4, "cells": [{"cell_type": "code", "metadata": "x"}]}',
     "is no notebook: its metadata are no tables"),
])
def test_what_is_no_notebook_of_python_is_one_line(tmp_path, text, says):
    (tmp_path / "a.ipynb").write_text(text)
    done = oars(tmp_path, "run", "-n", "2", "a.ipynb")
    assert (done.returncode, done.stderr) == (2, f"oars: a.ipynb {says}\n")


def test_without_ipython_one_line_names_the_extra(tmp_path):
    write(tmp_path / "a.ipynb", "1")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, path=None: None if name == 'IPython' else find(name, path)")
    done = oars(tmp_path, "run", "-n", "2", "a.ipynb", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stderr) == (
        2, "oars: a.ipynb: notebooks need IPython: pip install 'manyoars[notebook]'\n")


def test_a_limit_for_cells_is_for_notebooks(tmp_path):
    (tmp_path / "a.py").write_text("")
    done = oars(tmp_path, "run", "--cell-timeout", "3", "a.py")
    assert (done.returncode, done.stderr) == (2, "oars: --cell-timeout is for notebooks (.ipynb)\n")
