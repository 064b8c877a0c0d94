"""Are two runs of a script the same? Lines and files are, up to the last digits of a float32.

Whole numbers and words must be equal. Numbers with a fraction may differ by 1e-5 of their size, or by 1e-6.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

REL, ABS = 1e-5, 1e-6
NUMBER = re.compile(r"((?<![A-Za-z_])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)")


def same_number(a: str, b: str) -> bool:
    """Two printed numbers: equal as whole numbers, close as fractions."""
    if a == b:
        return True
    if not re.search(r"[.eE]", a + b):
        return False
    x, y = float(a), float(b)
    room = max(ABS, REL * max(abs(x), abs(y)))
    digits = [len(v.split(".")[1]) if "." in v and "e" not in v else 0 for v in (a, b)]
    if min(digits) >= 4 and digits[0] == digits[1]:
        room = max(room, 1.01 * 10 ** -digits[0])  # printed with a fixed width: the last digit may round either way
    return abs(x - y) <= room


def same_line(a: str, b: str) -> bool:
    """Two lines, word by word and number by number; white space does not count."""
    parts = [NUMBER.split(" ".join(line.split())) for line in (a, b)]
    if len(parts[0]) != len(parts[1]):
        return False
    # Signs take up room in printed arrays, so spaces next to numbers are dropped.
    return all(
        same_number(p, q) if i % 2 else p.replace(" ", "") == q.replace(" ", "")
        for i, (p, q) in enumerate(zip(*parts, strict=True))
    )


def scenes(lines: list[str]) -> dict[str, list[str]]:
    """Split a script's output at its ``== scene`` lines."""
    found: dict[str, list[str]] = {"(top)": []}
    name = "(top)"
    for line in lines:
        if line.startswith("== "):
            name = line[3:]
            found[name] = []
        else:
            found[name].append(line)
    return found


def lines_differ(one: list[str], many: list[str]) -> str:
    """What to tell about two outputs: the scenes that differ, and the first differing line of each. '' if none."""
    told = []
    a, b = scenes(one), scenes(many)
    for name in a:
        if name not in b:
            told.append(f"  {name}: not reached")
            continue
        for i in range(max(len(a[name]), len(b[name]))):
            p = a[name][i] if i < len(a[name]) else "(no more lines)"
            q = b[name][i] if i < len(b[name]) else "(no more lines)"
            if not same_line(p, q):
                told.append(f"  {name}, line {i + 1}:\n    one process: {p}\n    ranks:       {q}")
                break
    told += [f"  {name}: only on ranks" for name in b if name not in a]
    return "\n".join(told)


def values_differ(a: Any, b: Any, where: str = "", room: float = ABS) -> str:
    """Two loaded objects: '' if they are the same, else where they part."""
    if isinstance(a, torch.Tensor):
        if type(b) is not type(a):
            return f"{where}: {type(a).__name__} became {type(b).__name__}"
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{where}: {tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
        if a.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        if not a.dtype.is_floating_point:
            return "" if torch.equal(a, b) else f"{where}: integers differ"
        if torch.allclose(a.detach(), b.detach(), rtol=REL, atol=room, equal_nan=True):
            return ""
        return f"{where}: differs by {(a.detach() - b.detach()).abs().max().item():.3g}"
    if isinstance(a, np.ndarray):
        return values_differ(torch.from_numpy(a), torch.from_numpy(b) if isinstance(b, np.ndarray) else b, where, room)
    if isinstance(a, torch.nn.Module):
        return values_differ(a.state_dict(), b.state_dict(), where, room)
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} became {type(b).__name__}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{where}: keys {list(a)} became {list(b)}"
        pairs = [(f"{where}[{k!r}]", a[k], b[k]) for k in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)} items became {len(b)}"
        pairs = [(f"{where}[{i}]", p, q) for i, (p, q) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, float):
        close = a == b or abs(a - b) <= max(room, REL * abs(a)) or (a != a and b != b)
        return "" if close else f"{where}: {a} became {b}"
    else:
        return "" if a == b else f"{where}: {a!r} became {b!r}"
    return next((told for place, p, q in pairs if (told := values_differ(p, q, place, room))), "")


def load(path: Path) -> Any:
    """A file as values that can be compared."""
    if path.is_symlink():
        return str(path.readlink())
    if path.suffix == ".pt":
        return torch.load(path, weights_only=False)
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".pkl":
        return pickle.loads(path.read_bytes())
    if path.suffix == ".zip":
        return zipfile.ZipFile(path).namelist()
    return path.read_bytes()


def listing(folder: Path) -> dict[str, Path]:
    """Every file and empty folder a run left behind, but for the run folder; event files go by a common name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith("oars-runs") or "__pycache__" in name or (path.is_dir() and any(path.iterdir())):
            continue
        found[re.sub(r"tfevents.*", "tfevents", name)] = path
    return found


def files_differ(one: Path, many: Path, room: float = ABS) -> str:
    """What to tell about two folders: '' if they hold the same, up to ``room`` in what was saved as numbers."""
    a, b = listing(one), listing(many)
    told = [f"  {name}: missing" for name in a if name not in b] + [f"  {n}: should not be" for n in b if n not in a]
    for name in a:
        if name not in b or a[name].is_dir() or "tfevents" in name:
            continue
        p, q = load(a[name]), load(b[name])
        if isinstance(p, bytes) and p != q:
            try:
                differ = lines_differ(p.decode().splitlines(), q.decode().splitlines())
            except UnicodeDecodeError:
                differ = "  bytes differ"
        else:
            differ = values_differ(p, q, room=room)
        if differ:
            told.append(f"  {name} {differ.strip()}")
    return "\n".join(told)
