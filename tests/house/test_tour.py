"""``docs/tour.md`` leads through functions that exist, in files that exist."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
TOUR = (TOP / "docs" / "tour.md").read_text()
STOPS = re.findall(r"^\*\*(\d+)\. `(oars[\w.]+)`\*\* \(`(src/[\w/]+\.py)`\)", TOUR, re.MULTILINE)


def test_the_tour_has_at_most_twelve_stops():
    assert [int(number) for number, _, _ in STOPS] == list(range(1, len(STOPS) + 1))
    assert 6 <= len(STOPS) <= 12


def test_every_stop_is_a_function_in_the_file_it_names():
    for _, name, file in STOPS:
        module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
        found = importlib.import_module(module)
        assert name.startswith(f"{module}."), name
        for part in name.removeprefix(f"{module}.").split("."):
            found = getattr(found, part)
        assert callable(found), name


def test_every_name_in_the_text_of_a_stop_is_defined():
    """Names of functions, classes and attributes, ``_redo_backwards`` or ``Context.__init__``: somewhere in ``src``."""
    parsed = [ast.parse(path.read_text()) for path in (TOP / "src" / "oars").rglob("*.py")]
    nodes = [node for tree in parsed for node in ast.walk(tree)]
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))} | {
        n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    files = [path.relative_to(TOP / "src").with_suffix("") for path in (TOP / "src").rglob("*.py")]
    places = {part for file in files for part in file.parts}
    named = {part for text in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", TOUR.partition("## The command")[2])
             for part in text.removesuffix(".py").removesuffix(".json").split(".")
             if text != "train.py"}
    assert len(named) > 40 and named - defined - places == set()


def test_every_file_named_exists():
    for path in re.findall(r"`([\w/]+/[\w{},]+\.py)`", TOUR):
        names = re.sub(r"\{(.*)\}", lambda m: "{}", path)
        parts = re.search(r"\{(.*)\}", path)
        for each in parts[1].split(",") if parts else [""]:
            file = names.replace("{}", each)
            roots = (TOP, TOP / "src" / "oars", TOP / "src" / "oars" / "adapt" / "torch")
            assert any((root / file).exists() for root in roots), path


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", "docs/how-it-works.md", "README.md"])
def test_every_path_in_a_page_exists(page):
    text = (TOP / page).read_text()
    paths = set(re.findall(r"`((?:src|tests|bench|docs|examples)/[\w/.-]+[\w/])`", text))
    assert [path for path in sorted(paths) if not (TOP / path).exists()] == []


def test_every_patched_name_of_pytorch_is_in_the_table_of_patches():
    """By its name, or by a pattern: ``dropout*``, ``register_*_hook``, ``torch.func.*``."""
    table = (TOP / "docs" / "how-it-works.md").read_text().partition("## Table of patches")[2]
    named = re.findall(r"[\w*]+", table)
    patterns = [word for word in named if "*" in word and word != "*"]
    wholes = re.findall(r"`([\w.]+)\.\*`", table)
    tree = ast.parse((TOP / "src" / "oars" / "adapt" / "torch" / "seams.py").read_text())
    texts = {node.targets[0].id: node.value.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
             and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)}
    rows = [node.args for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Seam"]
    patched = [(ast.unparse(owner), name) for owner, names, _ in rows
               for name in (names.value if isinstance(names, ast.Constant) else texts.get(names.id, "")).split()]
    assert len(patched) > 100
    assert [f"{owner}.{name}" for owner, name in patched if name not in named and owner not in wholes
            and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def test_every_file_in_the_table_of_patches_exists():
    table = (TOP / "docs" / "how-it-works.md").read_text().partition("## Table of patches")[2]
    places = TOP / "src", TOP / "src" / "oars" / "adapt" / "torch"
    files = re.findall(r"\| `([\w./]+\.py)` \|$", table, re.MULTILINE)
    assert len(files) > 40
    assert [file for file in files if not any((place / file).exists() for place in places)] == []


def test_the_glossary_has_at_most_twenty_words():
    table = (TOP / "docs" / "design.md").read_text().partition("## Glossary")[2].partition("\n## ")[0]
    assert 10 <= len(re.findall(r"^\| \*", table, re.MULTILINE)) <= 20
