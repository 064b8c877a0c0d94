"""examples/imagenet: the four commands of its README run as they stand, and the network has learnt something."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from running import ROOT, environment

FOLDER = ROOT / "examples" / "imagenet"
sys.path.insert(0, str(FOLDER))
from nets import InceptionV3, ResNet50, build  # noqa: E402


def test_the_four_commands_end_well_above_chance(tmp_path):
    (block,) = re.findall(r"^```sh\n(.*?)^```", (FOLDER / "README.md").read_text(), re.M | re.S)
    commands = block.splitlines()
    assert len(commands) == 4
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "oars").write_text(f'#!/bin/sh\nexec {sys.executable} -m oars "$@"\n')
    (tools / "oars").chmod(0o755)
    env = environment(PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    accuracy = [float(v) for v in re.findall(r"top-1 ([\d.]+)%", done.stdout)]
    assert len(accuracy) == 7 and accuracy[-1] > 37.5, done.stdout  # three times chance; it is about 75
    saved = torch.load(tmp_path / "imagenet-out" / "last.pt", weights_only=True)
    assert saved["epoch"] == 6 and saved["top1"] == pytest.approx(accuracy[-1] / 100, abs=1e-3)
    assert list((tmp_path / "imagenet-out").glob("events.out.tfevents.*"))


def count(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_the_networks_have_the_published_sizes():
    with torch.device("meta"):  # shapes without numbers
        assert count(InceptionV3()) == 27_161_264 and len(InceptionV3().state_dict()) == 580
        assert count(InceptionV3(auxiliary=False)) == 23_834_568
        assert count(ResNet50()) == 25_557_032 and len(ResNet50().state_dict()) == 320


def test_maps_and_heads_have_the_papers_sizes():
    net = InceptionV3(classes=7, width=0.125).train()
    sizes = {}
    for name, module in net.named_children():
        module.register_forward_hook(lambda _, __, out, name=name: sizes.__setitem__(name, tuple(out.shape[2:])))
    logits, extra = net(torch.zeros(2, 3, 299, 299))
    assert logits.shape == extra.shape == (2, 7)
    assert sizes["Conv2d_4a_3x3"] == (71, 71) and sizes["Mixed_5d"] == (35, 35)
    assert sizes["Mixed_6e"] == (17, 17) and sizes["Mixed_7c"] == (8, 8)
    net.eval()
    assert net(torch.zeros(2, 3, 299, 299)).shape == (2, 7)


@pytest.mark.parametrize("name", ["inception_v3", "resnet50"])
def test_a_network_learns_a_batch_by_heart(name):
    torch.manual_seed(0)
    net = build(name, 4, 0.125, 75).train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    images, labels = torch.randn(16, 3, 75, 75), torch.arange(16) % 4
    if name == "inception_v3":
        net.dropout.p = 0.0
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
