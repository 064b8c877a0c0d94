"""The documentation site, for Sphinx: ``make docs``. See make_site.py.

The sources are the repository's pages where they lie. So a link from one to another, or to a file outside of ``docs``,
is the same on the site as in the repository.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from oars import __version__  # noqa: E402
from oars.arguments import Parser  # noqa: E402
from oars.cli import parsers  # noqa: E402
from oars.commands import shells  # noqa: E402

project, author, release = "manyoars", "The manyoars authors", __version__
root_doc = "docs/index"
include_patterns = ["docs/*.md", "*.md", "examples/**/*.md"]
exclude_patterns = [".*", "bench", "build", "dist", "oars-runs", "src", "tests", "README.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
smartquotes = False  # two dashes begin an option
highlight_language = "text"
autodoc_mock_imports = ["torch"]
html_theme = "furo"
html_title = "manyoars"
html_copy_source = html_show_sourcelink = html_show_copyright = False


def setup(app):
    app.connect("source-read", add_commands)


def add_commands(app, name: str, source: list[str]) -> None:
    """Put the verbs into the page of commands, in place of what is said of them in the repository."""
    if name == "docs/commands":
        source[0] = source[0].partition("<!--")[0] + commands(parsers())


def commands(parsers: Mapping[str, Parser]) -> str:
    """Every verb and its options, in Markdown."""
    lines = []
    for verb, parser in parsers.items():
        usage = " ".join(parser.format_usage().removeprefix("usage:").split())
        lines += [f"## {f'oars {verb}'.strip()}", "", plain(parser.description or ""), "", "```text", usage, "```", "",
                  "| | |", "|---|---|"]
        for option in shells.options_of(parser):
            value = "{" + ",".join(option.choices) + "}" if option.choices else option.takes
            words = [f"`{f'{name} {value}'.strip()}`" for name in option.names or [""]]
            cell = ", ".join(words).replace("|", r"\|")
            lines.append(f"| {cell} | {plain(option.help)} |")
        lines += ["", *(["```text", parser.epilog.rstrip(), "```", ""] if verb and parser.epilog else [])]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text without anything that Markdown knows."""
    return re.sub(r"([\\`*_{}\[\]<>|#$~])", r"\\\1", text)
