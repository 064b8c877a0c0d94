"""Every command that the README and the docs tell a reader to type runs, and nothing they point to is missing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT, environment, oars

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[list[str]]:
    """The commands of every ``sh`` block in every page, comments and blank lines aside."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S):
            lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in block.splitlines()]
            found.append([line for line in lines if line])
    return found


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder such as a reader would stand in: the checkout's examples and bench, a train.py, `oars` on the path."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "bench", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "oars-runs"))
    shutil.copy(ROOT / "examples" / "linear_fit.py", folder / "train.py")
    evolve = folder / "evolve"
    evolve.mkdir()
    shutil.copy(ROOT / "tests" / "docs" / "train_evolve.py", evolve / "train.py")
    blueprint, = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "evolve.md").read_text(), re.M | re.S)
    (evolve / "blueprint.toml").write_text(blueprint.replace("1e15", "2.5e9"))  # two candidates of so small a train.py
    tools = folder / "bin"
    tools.mkdir()
    for name, words in {"oars": f"{sys.executable} -m oars", "python": sys.executable}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    return folder, environment(PATH=path), set()


@pytest.mark.parametrize("block", blocks(), ids=lambda block: "; ".join(block))
def test_every_command_in_the_docs_runs(block, reader):
    folder, env, done = reader
    if any(" --prune " in command or command.startswith("oars evolve") for command in block):
        folder, done = folder / "evolve", set()
    for command in block:
        words = shlex.split(command)
        if words[0] == "make":  # too long, and too deep, to run from within `make test`: its targets must be there
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert [w for w in words[1:] if "=" not in w and w not in targets] == []
        elif words[:2] == ["pip", "install"]:
            check_install(words[-1])
        elif command not in done:
            run(command, folder, env)
            done.add(command)


def run(command: str, folder: Path, env: dict[str, str]) -> None:
    """Run one command as a shell would."""
    done = subprocess.run(
        command, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def check_install(what: str) -> None:
    """`pip install name[extra]`: the name and the extras are this project's."""
    project = (ROOT / "pyproject.toml").read_text()
    found = re.fullmatch(r"([\w-]+|\.)(?:\[([\w,]+)\])?", what)
    assert found and (found[1] == "." or f'name = "{found[1]}"' in project), what
    for extra in (found[2] or "").split(","):
        assert not extra or re.search(rf"^{extra} = \[", project, re.M), extra


def test_commands_for_a_queue_are_those_that_are_played_on_one():
    """tests/slurm plays the blocks ``sh slurm`` and ``sh pbs`` of docs/clusters.md."""
    played = (ROOT / "docs" / "clusters.md").read_text()
    for page in PAGES:
        for block in re.findall(r"^```sh (?:slurm|pbs)\n.*?^```", page.read_text(), re.M | re.S):
            assert block.removesuffix("```") in played, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_page_knows_the_machine_it_was_written_on(page):
    text = page.read_text()
    assert not re.search(r"(?<![\w.])/(?:root|home|work|opt|tmp)/", text)


def test_every_option_named_in_the_docs_is_one_of_oars_run():
    shown = oars(ROOT, "run", "--help").stdout
    for page in PAGES:
        if page.name == "design.md":
            continue
        for command in re.findall(r"`oars run ([^`]*)`", page.read_text()):
            own = command.split(".py")[0]
            for option in re.findall(r"--[a-z-]+", own):
                assert option in shown, f"{page.name}: oars run has no {option}"
