"""Names of PyTorch that it does not promise: each is there, each is used, and no other is."""

from __future__ import annotations

import ast
import re
import types

import pytest
import torch
from running import ROOT, SOURCE, oars
from torch import nn
from torch.utils.data import DataLoader

from oars.adapt.torch import private_names
from oars.adapt.torch.private_names import MAYBE, NAMES, has

# Private names of the standard library, with the same heuristics: of sys, posix, functools, threading, named tuples.
OF_PYTHON = {"_getframe", "_exit", "_lru_cache_wrapper", "_DummyThread", "_replace", "_fields"}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x


@pytest.fixture(scope="module")
def made():
    loader = DataLoader(Samples(), num_workers=1)
    with_workers = iter(loader)
    scaler = torch.amp.GradScaler("cpu")
    module = nn.Linear(1, 1)
    yield {"(DataLoader)": DataLoader(Samples()), "(iterator of a DataLoader)": iter(DataLoader(Samples())),
           "(iterator with workers)": with_workers, "(GradScaler)": scaler, "(Module)": module,
           "(autograd.Function)": Square, "(storage)": torch.zeros(1).untyped_storage(),
           "(state_dict)": module.state_dict(), "(compiled module)": torch.compile(nn.Linear(1, 1))}
    with_workers._shutdown_workers()


def test_every_private_name_is_in_this_pytorch(made):
    assert [*private_names.missing()] == []
    gone = [f"{place} {name}: {without}" for place, names, without in NAMES if place.startswith("(")
            for name in names.split() if not has(made[place], "", name)]
    assert gone == []


def test_a_name_that_is_gone_is_found(monkeypatch):
    monkeypatch.setattr(private_names, "NAMES", (
        private_names.Private("torch._C", "DisableTorchFunction _no_such", "x"),
        private_names.Private("torch._no_such.inner", "name", "y"),
        private_names.Private("torch.nn.Module", "_call_impl", "z")))
    assert [(one.place, one.names) for one in private_names.missing()] == [
        ("torch._C", "_no_such"), ("torch._no_such.inner", "name")]


def test_no_other_private_name_of_pytorch_is_used_and_none_is_listed_in_vain():
    listed = {name for one in NAMES for name in one.names.split()} | set(MAYBE.split())
    used, ours, words = set(), set(), set()
    for path in sorted((ROOT / "src" / "oars").rglob("*.py")):
        tree = ast.parse(path.read_text())
        here = path.relative_to(ROOT / "src" / "oars").as_posix().startswith(("adapt/torch/", "evolve/"))
        if path.name != "private_names.py":
            words |= set(re.findall(r"\w+", path.read_text()))
        for node in ast.walk(tree):
            ours |= _defined(node)
            used |= _asked_for(node) if here else set()
    modules = {part for one in NAMES for part in one.place.split(".")} | {"_C", "_utils"}
    assert used - ours - listed - OF_PYTHON - modules - _own(used) == set()
    assert listed - words == {"_disable_dynamo"}  # named by its module: see lazy_dynamo.py


def _own(names: set[str]) -> set[str]:
    """Attributes that we put on others' objects."""
    return {name for name in names if name.startswith("_oars_")}


def _asked_for(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        return {alias.name for alias in node.names if alias.name.startswith("_") or "._" in (node.module or "")}
    if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
        return {node.attr}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        return {name} if re.match(r"_[a-zA-Z]", str(name)) else set()
    return set()


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        return {node.attr} if node.value.id == "self" else set()
    return set()


@pytest.mark.parametrize(("version", "line"), [
    ("2.13.0+cpu", ""), ("2.13.4", ""), ("2.7.0+cu126", ""), ("2.10.0", ""),
    ("2.6.0", "PyTorch 2.6.0 is not a version that oars was tested with (2.7 to 2.13): check the training with oars "
     "verify"),
    ("2.14.0a0+git1", "PyTorch 2.14.0a0 is not a version that oars was tested with (2.7 to 2.13): check the training "
     "with oars verify"),
])
def test_a_version_that_was_not_tested_gets_one_line(version, line):
    torch_like = types.ModuleType("torch")
    torch_like.__version__ = version
    assert private_names.outside(torch_like) == line


def test_a_run_on_such_a_version_says_it_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "from oars.adapt.torch import private_names\nprivate_names.TESTED = ((1, 0), (1, 9))\n")
    (tmp_path / "train.py").write_text("import torch\nprint('done')\n")
    done = oars(tmp_path, "run", "--quiet", "-n", "2", "train.py", code=0, PYTHONPATH=f"{tmp_path}:{SOURCE}")
    version = torch.__version__.partition("+")[0]
    assert done.stdout == "done\n" and done.stderr.splitlines()[0] == (
        f"oars: PyTorch {version} is not a version that oars was tested with (1.0 to 1.9): check the training with "
        "oars verify")
    assert done.stderr.count("is not a version") == 1
