"""Makes docs/run.svg: a real run in a terminal, as it was seen.

    python docs/picture.py

The command below runs in a pseudo-terminal; what it prints, colours included, is drawn by rich. Lines that were drawn
over (the live status line) are gone at the end, as on a real screen.
"""

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
COMMANDS = ["oars run -n 2 digits_cnn.py --images 2000", "oars verify -n 2 digits_softmax.py --epochs 1"]


def capture(command, cwd):
    """Run a command in a pseudo-terminal and return what was on the screen when it ended, line by line."""
    words = command.replace("oars ", f"{sys.executable} -m oars ", 1).split()
    words = [str(HERE.parent / "examples" / w) if w.endswith(".py") else w for w in words]
    ours, theirs = pty.openpty()
    source = os.pathsep.join(p for p in (str(HERE.parent / "src"), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "PYTHONPATH": source, "COLUMNS": "118", "TERM": "xterm-256color"}
    process = subprocess.Popen(words, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # the terminal's other end is closed: the run is over
        pass
    if process.wait():
        sys.exit(f"{command} failed:\n{seen.decode(errors='replace')}")
    lines = []
    for line in seen.decode(errors="replace").replace("\r\n", "\n").split("\n"):
        line = re.split(r"\r|\x1b\[2K|\x1b\[1?G", line)[-1]  # what was written over does not show
        lines.append(re.sub(r"\x1b\[(?!\d*(?:;\d+)*m)[?\d;]*[A-Za-z]", "", line))
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def main():
    console = Console(record=True, width=118, file=open(os.devnull, "w"))
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            console.print(Text(f"$ {command}", style="bold"))
            for line in capture(command, folder):
                console.print(Text.from_ansi(line))
    svg = console.export_svg(title="oars")
    # No fonts from afar: the reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)
    (HERE / "run.svg").write_text(svg)
    print(f"wrote {HERE.name}/run.svg")


if __name__ == "__main__":
    main()
