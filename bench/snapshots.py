"""What snapshots cost: recording, a snapshot itself, playing a step. ``python bench/snapshots.py`` (two minutes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 3000
SCRIPT = f"""
import os, signal, sys
from time import process_time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(6400, 64), torch.randint(0, 10, (6400,))), 64, shuffle=True)
layers = nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
model = nn.Sequential(*layers)
optimizer, total, step = torch.optim.Adam(model.parameters(), 1e-3), 0.0, 0
for epoch in range({STEPS} // 100):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        step += 1
        if step == 100:
            began = process_time()
print((process_time() - began) / (step - 100) * 1e6)
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def oars(folder: Path, *args: str) -> str:
    """What a command printed."""
    done = subprocess.run([sys.executable, "-m", "oars", *args], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "train.py").write_text(SCRIPT)
        off, on = [], []
        for _ in range(5):
            off.append(float(oars(folder, "run", "-n", "1", "--snapshot", "off", "train.py")))
            on.append(float(oars(folder, "run", "-n", "1", "train.py")))
        more = min(on) - min(off)
        print(f"a step: {min(off):.0f} µs, recorded: {min(on):.0f} µs (+{more:.0f} µs); CPU time, best of 5")
        oars(folder, "run", "-n", "1", "--name", "r", "--snapshot", f"{STEPS // 2 - 10}steps", "train.py", "kill")
        run = folder / "oars-runs/r"
        tape = (run / "snapshots/tape").stat().st_size
        print(f"the tape: {tape / STEPS:.0f} bytes a step")
        oars(folder, "resume", "r")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        played = next(e for e in events if e["event"] == "resumed")
        print(f"playing: {played['seconds'] / played['step'] * 1e6:.0f} µs a step ({played['step']} steps)")
        taken = [e["seconds"] for e in events if e["event"] == "snapshot"]
        print(f"a snapshot of {events[0]['bytes'] / 1e6:.1f} MB: {min(taken):.2f} s, the copy apart in the background")


if __name__ == "__main__":
    main()
