"""The house rules hold in the whole tree, and each is shown to fail on a small broken example."""

from __future__ import annotations

from pathlib import Path

import pytest
import rules

ROOT = Path(__file__).resolve().parents[2]


def _read(*folders: str, kind: str = "*.py") -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
            for folder in folders for path in sorted((ROOT / folder).rglob(kind))}


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    return _read("src/oars")


def test_rooms_import_downwards(ours):
    _hold(rules.rule_rooms(ours))


def test_no_import_cycles(ours):
    _hold(rules.rule_cycles(ours))


def test_no_file_over_500_lines(ours):
    _hold(rules.rule_size(ours | _read("tests", "bench", "examples") | _read("src", "tests", kind="*.[ch]")))


def test_no_line_of_c_over_120_characters():
    _hold(rules.rule_width(_read("src", "tests", kind="*.[ch]")))


def test_no_assignment_across_modules(ours):
    _hold(rules.rule_assignments(ours))


def test_patches_only_in_seam_files(ours):
    _hold(rules.rule_patches(ours))


def test_run_folder_names_only_in_runfolder(ours):
    _hold(rules.rule_run_folder(ours))


def test_no_test_imports_another():
    _hold(rules.rule_tests(_read("tests")))


def _hold(found: list[str]) -> None:
    if found:
        lines = [f"a house rule (tests/house/rules.py) is broken {len(found)} times:", *found]
        pytest.fail("\n".join(lines), pytrace=False)


def _made(**files: str) -> dict[str, str]:
    """Sources by short names: ``engine_world="…"`` is ``src/oars/engine/world.py``; ``__`` stands for ``_``."""
    return {f"src/oars/{name.replace('__', '-').replace('_', '/').replace('-', '_')}.py": text
            for name, text in files.items()}


def test_an_upward_import_is_found():
    found = rules.rule_rooms(_made(engine_world="import sys\nfrom oars.rank import main\n", rank_main=""))
    assert found == ["src/oars/engine/world.py:2: rooms: oars.engine.world is below oars.rank.main: "
                     "move what both need to the lower room"]


def test_an_upward_import_in_a_function_is_found_and_one_for_types_is_not():
    later = _made(data_csv="def f():\n    import oars.cli\n", cli="")
    assert rules.rule_rooms(later)[0].startswith("src/oars/data/csv.py:2: rooms: ")
    types = _made(data_csv="if TYPE_CHECKING:\n    from oars.cli import main\n", cli="")
    assert not rules.rule_rooms(types)
    assert not rules.rule_rooms(_made(cli="from oars.data import csv\n", data_csv="import oars\n"))


def test_an_upward_import_inside_adapt_is_found():
    found = rules.rule_rooms(_made(adapt_torch_context="from oars.adapt.keras import call\n", adapt_keras_call=""))
    assert found and ":1: rooms: oars.adapt.torch.context is below oars.adapt.keras.call" in found[0]


def test_a_file_in_no_room_is_found():
    with pytest.raises(LookupError, match="oars.helpers is in no room"):
        rules.rule_rooms(_made(helpers="from oars import records\n", records=""))


def test_an_import_cycle_is_found():
    found = rules.rule_cycles(_made(data_a="from oars.data import b\n", data_b="from oars.data.c import f\n",
                                    data_c="def f():\n    from oars.data.a import g\n", data_d="import oars.data.a\n"))
    assert found == ["src/oars/data/a.py:1: cycles: oars.data.a -> oars.data.b -> oars.data.c -> oars.data.a: "
                     "move what both need to a module that imports neither"]


def test_a_long_file_is_found():
    assert rules.rule_size({"tests/a.py": "\n" * 500, "tests/b.py": "\n" * 501}) == \
        ["tests/b.py:501: size: 501 lines, at most 500: divide it by subject"]


def test_a_long_line_is_found():
    assert rules.rule_width({"src/a.c": "x" * 120 + "\n" + "y" * 121}) == \
        ["src/a.c:2: width: 121 characters, at most 120: break the line"]


@pytest.mark.parametrize("source", [
    "from oars.engine import world\nworld.phase = print\n",
    "import oars.engine.world\noars.engine.world.phase = print\n",
    "from oars.engine import world\nworld.count += 1\n",
    "from oars.engine import world\ndel world.phase\n",
    "from oars.engine import world\nsetattr(world, 'phase', print)\n",
    "from oars.engine import world\nvars(world)['phase'] = print\n",
    "from oars.engine import world as w\na, (w.phase, b) = 1, (2, 3)\n",
    "from oars.engine.world import World\nWorld.phase = print\n",
    "from oars.engine import world\nworld.World.phase = print\n",
    "def f():\n    from oars.engine.world import here; here.phase = print\n",
])
def test_an_assignment_across_modules_is_found(source):
    found = rules.rule_assignments(_made(rank_main=source))
    assert len(found) == 1 and found[0].startswith("src/oars/rank/main.py:2: assignments: oars.engine.world.")


@pytest.mark.parametrize("source", [
    "from oars.adapt.torch.context import ctx\nctx.plain = True\nctx.world.sent += 1\n",  # a typed, shared object
    "from oars.engine import world\ndef f(world):\n    world.phase = 1\n",  # another thing with the same name
    "from oars.engine import world\nhere = world.World()\nhere.phase = 1\n",  # an object of one's own
    "class Mine:\n    pass\nMine.phase = 1\nsetattr(Mine, 'phase', 2)\n",
])
def test_an_assignment_of_ones_own_is_none_across_modules(source):
    assert not rules.rule_assignments(_made(rank_main=source))
    assert not rules.rule_patches(_made(rank_main=source))


def test_replacing_a_method_of_a_shared_object_is_found():
    source = "from oars.adapt.torch.context import ctx\nsetattr(ctx.world, 'allreduce', print)\n"
    assert len(rules.rule_assignments(_made(rank_main=source))) == 1


@pytest.mark.parametrize("source", [
    "import torch\ntorch.save = print\n",
    "from torch import nn\nnn.Module.__call__ = print\n",
    "from torch.utils.data import DataLoader\nDataLoader.__iter__ = print\n",
    "import time\nsetattr(time, 'sleep', print)\n",
    "import torch\nfor kind in (torch.nn.Module, torch.Tensor): kind.save = print\n",
    "import torch\nkind = torch.Tensor; kind.grad = None\n",
    "def patch(torch):\n    torch.save = print\n",
    "def patch(module: ModuleType):\n    module.save = print\n",
    "when_imported('secrets', lambda secrets: 0); when_imported('secrets', patch)\ndef patch(s): s.choice = print\n",
    "import sys\nsys.modules['numpy.random'].seed = print\n",
    "def patch(owner, name):\n    setattr(owner, name, print)\n",
    "import tensorflow as tf\nvars(tf).update(save=print)\n",
])
def test_a_patch_outside_a_seam_file_is_found(source):
    found = rules.rule_patches(_made(adapt_torch_context=source))
    assert len(found) == 1 and found[0].startswith("src/oars/adapt/torch/context.py:2: patches: ")
    assert not rules.rule_patches(_made(adapt_torch_seams=source))


@pytest.mark.parametrize("source", [
    "from oars.adapt.python import patching\n", "from oars.adapt.python.patching import Layer, put\n",
    "def later():\n    import oars.adapt.python.patching\n",
])
def test_what_puts_patches_in_place_is_for_seam_files(source):
    assert ": patches: " in rules.rule_patches(_made(adapt_torch_context=source))[0]
    assert not rules.rule_patches(_made(adapt_torch_seams=source))
    assert not rules.rule_patches(_made(adapt_torch_context="from oars.adapt.python.patching import Layer\n"))


def test_settings_of_the_standard_library_are_no_patches():
    assert not rules.rule_patches(_made(rank_main="import sys\nsys.argv = []\nsys.stdout = None\n"))


@pytest.mark.parametrize("source", [
    'folder / "run.json"\n', 'f"{folder}/run.json"\n', 'open("a/run.json")\n',
    'f"rank-{r}.log"\n', '"rank-{}.log".format(1)\n', 'folder.glob("rank-*.log")\n', 'folder / "stacks"\n',
    'os.path.join(folder, "stacks")\n',
])
def test_a_run_folder_name_elsewhere_is_found(source):
    found = rules.rule_run_folder(_made(runfolder=_RUNFOLDER, rank_main="\n" + source))
    assert len(found) == 1 and found[0].startswith("src/oars/rank/main.py:2: run folder: ")


@pytest.mark.parametrize("source", ['folder / "new.json"\n', 'my.folder.resolve() / "new"\n', 'folder / f"new-{r}"\n'])
def test_a_run_folder_name_that_runfolder_does_not_know_is_found(source):
    found = rules.rule_run_folder(_made(runfolder=_RUNFOLDER, rank_main="\n" + source))
    assert len(found) == 1 and found[0].startswith("src/oars/rank/main.py:2: run folder: ")
    assert not rules.rule_run_folder(_made(runfolder=_RUNFOLDER, data_pack="\n" + source))


def test_other_strings_are_no_run_folder_names():
    source = '"""Writes run.json."""\nsizes["stacks"]\nf"log-{r}.rank"\nsay("no run.json here")\n'
    assert not rules.rule_run_folder(_made(runfolder=_RUNFOLDER, rank_main=source))


@pytest.mark.parametrize("source", ["import test_b\n", "from test_b import run\n", "from tests.test_b import run\n"])
def test_a_test_that_imports_another_is_found(source):
    assert rules.rule_tests({"tests/test_a.py": source})[0].startswith("tests/test_a.py:1: tests: ")
    assert not rules.rule_tests({"tests/test_a.py": "import running\n"})


_RUNFOLDER = '''
RUN, END = "run.json", "end.json"
STACKS: str = "stacks"


def log(rank):
    return f"rank-{rank}.log"
'''
