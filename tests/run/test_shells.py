"""``oars --version``, and what is printed for shells and for ``man``: all of it from the parsers."""

from __future__ import annotations

import argparse
import re
import subprocess

import pytest
from running import oars

import oars as package
from oars.cli import parsers


def shown(parser):
    """The options that --help shows: not -m of oars sweep, nor --host of oars label, which only says no."""
    return [name for action in parser._actions if action.help is not argparse.SUPPRESS
            for name in action.option_strings]


def printed(folder, *args):
    return oars(folder, *args, code=0).stdout


def test_the_version_is_the_packages(tmp_path):
    assert printed(tmp_path, "--version") == f"oars {package.__version__}\n"


@pytest.mark.parametrize(("line", "offered"), [
    ("oars ver", "verify"),
    ("oars run --ba", "--batch --backup"),
    ("oars run --batch ", "split keep"),
    ("oars run --batch k", "keep"),
    ("oars run --name ", ""),  # a value that nobody can know: the shell's own, files
    ("oars run -n 2 --sta", "--staleness --stage-env --stall"),
    ("oars run -n 2 train.py --sta", ""),  # the script's words
    ("oars resume ", "first second"),
    ("oars resume --sn", "--snapshot"),
    ("oars submit -N 2 --ti", "--time"),
    ("oars data ", "pack check show stats export make"),
    ("oars data make im", "imagenet-like"),
    ("oars data pack a --wo", "--workers"),
    ("oars scale train.py --we", "--weak"),
    ("oars label run.h5 --si", "--simulate"),
    ("oars completion ", "bash zsh fish"),
])
def test_bash_completes(tmp_path, line, offered):
    script = tmp_path / "completion"
    script.write_text(printed(tmp_path, "completion", "bash"))
    for run in ("first", "second", "$(touch${IFS}pwned)"):  # a name must not be run
        (tmp_path / "oars-runs" / run).mkdir(parents=True)
    *words, last = line.split(" ")
    asked = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _oars; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-uc", asked, "bash", *words, last], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{offered}\n", "") and not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_every_option_is_in_the_script_of_each_shell(tmp_path, shell):
    text = printed(tmp_path, "completion", shell)
    missing = []
    for verb, parser in parsers().items():
        for name in shown(parser) if verb else []:
            dashed = f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')} "
            lines = re.findall(rf'__oars_at "{verb}".* {dashed}', text) if shell == "fish" else \
                re.findall(rf'^ +"{verb}"\).*[" ]{name}[" ]', text, re.M)
            missing += [] if lines else [f"{verb} {name}"]
    assert not missing
    assert text.startswith("#compdef oars\n") == (shell == "zsh")


def test_the_manual_page_has_every_verb_option_and_example(tmp_path):
    text = printed(tmp_path, "man")
    assert text.startswith(".TH OARS 1 ")
    plain = text.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "").replace("\\e", "\\").replace("\\&", "")
    for verb, parser in parsers().items():
        assert not verb or f'.SS "oars {verb}"' in plain
        for option in shown(parser):
            assert re.search(rf"^{option}\b|, {option}\b", plain, re.M), f"{verb} {option}"
        for line in (parser.epilog or "").splitlines() if verb else []:
            assert line.replace("…", "...") in plain
    assert not [line for line in text.splitlines() if line.startswith("'") or "%(" in line or not line.isascii()]


def test_an_unknown_shell_is_one_line(tmp_path):
    done = oars(tmp_path, "completion", "tcsh")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("oars: argument shell: invalid choice: 'tcsh'")
