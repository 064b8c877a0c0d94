"""Make the documentation site: python docs/make_site.py FOLDER (``make docs``: build/site).

A warning of Sphinx, a link that leads nowhere, and anything that a page would load from another host is an error.
"""

from __future__ import annotations

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
START = "docs/index.html"
FIRST = f'<!doctype html><meta http-equiv="refresh" content="0; url={START}"><a href="{START}">manyoars</a>\n'
HOST = r"""((?:https?:|wss?:)?//[^/\s"'`)][^\s"'`)]*)"""
LOADS = {".css": rf"""(?:url\(\s*["']?|@import\s+["']){HOST}""",
         ".js": rf"""(?:(?:fetch|import|importScripts|Worker|WebSocket)\(|\.src\s*=)\s*["'`]{HOST}"""}


class Page(HTMLParser):
    """What a page loads, where its links lead to, and the names of its parts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names.update(found[name] for name in ("id", "name") if name in found)
        targets = [found[name] for name in ("src", "data", "poster", "href", "xlink:href") if found.get(name)]
        targets += [part.split()[0] for part in found.get("srcset", "").split(",") if part.strip()]
        (self.links if tag == "a" else self.loads).extend(targets)
        self.loads.extend(re.findall(LOADS[".css"], found.get("style", "")))


def wrong(site: Path) -> list[str]:
    """What is wrong with a site: a line each."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        said = path.relative_to(site)
        for target in [*page.loads, *page.links]:
            to = urlsplit(target)
            if to.netloc or to.scheme:
                if target in page.loads and to.scheme != "data":
                    found.append(f"{said} loads {target} from elsewhere")
                continue
            file = (path.parent / unquote(to.path)).resolve() if to.path else path
            if not file.exists():
                found.append(f"{said}: {target} is not there")
            elif to.fragment and file in pages and unquote(to.fragment) not in pages[file].names:
                found.append(f"{said}: {target}: the page has no such part")
    for path in sorted(site.rglob("*")):
        for target in re.findall(LOADS[path.suffix], path.read_text()) if path.suffix in LOADS else []:
            found.append(f"{path.relative_to(site)} loads {target} from elsewhere")
    return found


def main(site: Path) -> int:
    """Make the site and return the exit code."""
    from sphinx.cmd.build import main as sphinx

    shutil.rmtree(site, ignore_errors=True)
    cache = site.parent / "doctrees"
    code = sphinx(["-q", "-E", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(cache), str(ROOT), str(site)])
    if code:
        return code
    (site / "index.html").write_text(FIRST)
    found = wrong(site)
    print("".join(f"{line}\n" for line in found), end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
