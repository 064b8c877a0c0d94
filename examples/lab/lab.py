"""Runs the four exercises, small, and joins their pictures and tables in lab-report.html.

    python examples/lab/lab.py [--images N] [--data FOLDER]

Everything is done with the command `oars`, as the pages beside this file tell it; what has run is not run again.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from html import escape
from pathlib import Path

LAB = Path(__file__).resolve().parent
METRIC = r"step (\d+) accuracy ([\d.]+)"


def exercises(images, data):
    """The title, the page of text, and the command of each."""
    files = ["--data", data] if data else []
    cores = len(os.sched_getaffinity(0))
    few = ["--images", str(images), *files]
    return [
        ("1. A line through four points", "1-linear.md", [
            "sweep", LAB / "linear.py", "--name", "lab-1", "--metric", r"final loss ([-+.\w]+)", "--best", "min",
            "--set", "solver=sgd:0.025,sgd:0.01,sgd:0.001,adam:0.01,adadelta:0.01"]),
        ("2. One softmax layer", "2-softmax.md", [
            "sweep", LAB / "softmax.py", "--name", "lab-2", "--metric", METRIC, "--set",
            "solver=sgd:0.5,sgd:0.05,sgd:500,momentum:0.05,adam:0.001", *(["--", *files] if files else [])]),
        ("3. A convolutional network", "3-cnn.md", [
            "sweep", LAB / "cnn.py", "--name", "lab-3", "--metric", METRIC, "--parallel", "1",
            "--set", "epochs=1,4", "--set", "order=file,shuffled", "--", *few]),
        ("4. The same, on more devices", "4-scale.md", [
            "scale", LAB / "cnn.py", "--name", "lab-4", "--metric", METRIC,
            "-n", ",".join(str(n) for n in (1, 2, 4) if n <= max(2, cores)), "--", "--order", "shuffled", *few]),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4_000, help="to train the convolutional network on")
    parser.add_argument("--data", help="folder with MNIST's IDX files; without it digits are drawn")
    args = parser.parse_args()
    parts = []
    for title, text, words in exercises(args.images, args.data):
        print(f"\n{title}: oars {' '.join(map(str, words))}", flush=True)
        began = time.time()
        done = subprocess.run([sys.executable, "-m", "oars", *map(str, words)])
        if done.returncode:
            raise SystemExit(f"exercise {title} ended with exit code {done.returncode}")
        print(f"{time.time() - began:.0f} s", flush=True)
        report = Path("oars-runs", words[words.index("--name") + 1], "report.html").read_text()
        head, _, body = report.partition("<body>")
        body = re.sub(r"<h1>.*?</h1>", "", body.partition("</body>")[0])
        question = (LAB / text).read_text().split("\n\n")[1]  # the page's first paragraph
        command = "oars " + " ".join(os.path.relpath(w) if isinstance(w, Path) else w for w in map(_plain, words))
        parts.append(f"<h2>{escape(title)}</h2><p>{escape(question)}</p><pre>{escape(command)}</pre>{body}")
    out = Path("lab-report.html")
    out.write_text(re.sub(r"<title>.*?</title>", "<title>Lab</title>", head) + "<body><h1>Lab</h1>" + "".join(parts)
                   + "</body></html>\n", encoding="utf-8")
    print(out)


def _plain(word):
    return word if isinstance(word, Path) or re.fullmatch(r"[\w.,:=/+-]+", word) else f"'{word}'"


if __name__ == "__main__":
    main()
