"""``make docs``: the site is made without a warning, has every verb and option, and loads nothing from elsewhere."""

from __future__ import annotations

import argparse
import html
import importlib.util
import os
import re
import shutil
import sys

import pytest
from running import ROOT, finished

from oars.cli import parsers

spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
make_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_site)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = finished(ROOT, sys.executable, "docs/make_site.py", folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_page_of_the_repository_is_on_the_site_and_in_its_contents(site):
    start = (site / "docs" / "index.html").read_text()
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("*.md")]:
        name = page.relative_to(ROOT).with_suffix(".html")
        if str(name) not in ("README.html", "docs/index.html"):
            assert (site / name).exists() and f'href="{os.path.relpath(name, "docs")}"' in start, name


def test_every_verb_and_option_is_on_the_page_of_commands(site):
    page = (site / "docs" / "commands.html").read_text()
    for verb, parser in parsers().items():
        section, = re.findall(rf'<section id="{f"oars {verb}".strip().replace(" ", "-")}">(.*?)</section>', page, re.S)
        lines = [" ".join(line.split()) for line in html.unescape(re.sub(r"<[^>]*>", "", section)).splitlines()]
        for action in parser._actions:
            if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction):
                said = (action.help or "") % {"default": action.default, "prog": parser.prog}
                assert " ".join(said.split()) in " ".join(lines), f"{verb}: {said}"
                for option in action.option_strings:
                    assert any(re.match(rf"(-.*, )?{option}\b", line) for line in lines), f"{verb} {option}"


def test_the_python_interface_has_its_signatures_and_its_documentation(site):
    text = re.sub(r"<[^>]*>", "", (site / "docs" / "api.html").read_text())
    for said in ("oars.data.open(path", "quarantine", "oars.keep(obj", "oars.evolve.fit(model", "split(*shares",
                 "random_resized_crop(size"):
        assert said in text, said


@pytest.mark.parametrize(("name", "text", "found"), [
    ("a.html", '<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js from elsewhere"),
    ("a.html", '<link rel="stylesheet" href="//fonts.example/css">', "loads //fonts.example/css from elsewhere"),
    ("a.html", '<img srcset="b.png 1x, http://a.example/b.png 2x">', "loads http://a.example/b.png from elsewhere"),
    ("a.html", '<p style="background: url(http://a.example/b.png)">', "loads http://a.example/b.png from elsewhere"),
    ("a.css", "@import 'https://fonts.example/css';", "loads https://fonts.example/css from elsewhere"),
    ("a.css", "a { src: url( //fonts.example/f.woff2 ) }", "loads //fonts.example/f.woff2 from elsewhere"),
    ("a.js", 'fetch("https://api.example/v1")', "loads https://api.example/v1 from elsewhere"),
    ("a.js", "s.src = 'https://cdn.example/x.js'", "loads https://cdn.example/x.js from elsewhere"),
    ("a.html", '<a href="gone.html">x</a>', "gone.html is not there"),
    ("a.html", '<b id="there"></b><a href="#here">x</a>', "#here: the page has no such part"),
    ("a.html", '<b id="there"></b><a href="#there">x</a> <a href="https://a.example">x</a>', ""),
    ("a.css", "/* https://a.example */ a { src: url(f.woff2), url(data:image/png;base64,//x) }", ""),
])
def test_what_is_wrong_with_a_site_is_found(tmp_path, name, text, found):
    (tmp_path / "b.png").touch()
    (tmp_path / name).write_text(text)
    lines = make_site.wrong(tmp_path)
    assert (len(lines), found in "".join(lines)) == (1 if found else 0, True)


def test_a_broken_link_or_anchor_stops_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    for name in ("conf.py", "make_site.py"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    links = "[b](gone.md) [c](#part) [d](../src/gone.py) [e](index.md#piece)"
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{links}\n")
    done = finished(tmp_path, sys.executable, "docs/make_site.py", "site", code=1)
    for name in ("gone.md", "part", "../src/gone.py", "piece"):
        assert name in done.stderr
