"""Inception V3 and ResNet-50 in plain PyTorch.

Parameters have the names and shapes that torchvision's have, so weights can be exchanged with it;
`same_as_torchvision.py` compares the outputs. Inception V3 ("Rethinking the Inception Architecture for Computer
Vision", Szegedy and others, 2015) has 27,161,264 parameters with its auxiliary head and 1000 classes. `width` makes all
layers narrower, for small machines.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Conv(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, inputs, outputs, kernel, stride=1, padding=0):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Several branches over the same input, their outputs side by side.

    A branch is a list of steps: a convolution (name, outputs, kernel), with "/2" behind its name for one that halves
    the image; "avg" or "max" for pooling; or a list of convolutions that all see the same input.
    """

    def __init__(self, inputs, width, branches):
        super().__init__()
        self.branches, self.outputs = [], 0
        for branch in branches:
            steps, channels = [], inputs
            for step in branch:
                if isinstance(step, str):
                    steps.append(step)
                elif isinstance(step, list):
                    channels_in, channels = channels, 0
                    for name, outputs, kernel in step:
                        channels += self._conv(channels_in, name, narrow(outputs, width), kernel)
                    steps.append([name for name, _, _ in step])
                else:
                    name, outputs, kernel = step
                    channels = self._conv(channels, name, narrow(outputs, width), kernel)
                    steps.append([name.removesuffix("/2")])
            self.branches.append(steps)
            self.outputs += channels

    def _conv(self, inputs, name, outputs, kernel):
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        half = name.endswith("/2")
        padding = (0, 0) if half else (high // 2, wide // 2)
        self.add_module(name.removesuffix("/2"), Conv(inputs, outputs, (high, wide), 2 if half else 1, padding))
        return outputs

    def forward(self, x):
        out = []
        for steps in self.branches:
            y = x
            for step in steps:
                if step == "avg":
                    y = F.avg_pool2d(y, 3, 1, 1)
                elif step == "max":
                    y = F.max_pool2d(y, 3, 2)
                else:
                    made = [getattr(self, name)(y) for name in step]
                    y = made[0] if len(made) == 1 else torch.cat(made, 1)
            out.append(y)
        return torch.cat(out, 1)


def narrow(channels, width):
    """So many channels at this width: a multiple of 8."""
    return channels if width == 1 else max(8, round(channels * width / 8) * 8)


def block_a(pool):
    """35 × 35: 1 × 1, 5 × 5, and 3 × 3 twice."""
    return [[("branch1x1", 64, 1)],
            [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
            [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
            ["avg", ("branch_pool", pool, 1)]]


BLOCK_B = [[("branch3x3/2", 384, 3)],  # 35 × 35 to 17 × 17
           [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3/2", 96, 3)],
           ["max"]]


def block_c(inner):
    """17 × 17: 7 × 7 as 1 × 7 and 7 × 1."""
    return [[("branch1x1", 192, 1)],
            [("branch7x7_1", inner, 1), ("branch7x7_2", inner, (1, 7)), ("branch7x7_3", 192, (7, 1))],
            [("branch7x7dbl_1", inner, 1), ("branch7x7dbl_2", inner, (7, 1)), ("branch7x7dbl_3", inner, (1, 7)),
             ("branch7x7dbl_4", inner, (7, 1)), ("branch7x7dbl_5", 192, (1, 7))],
            ["avg", ("branch_pool", 192, 1)]]


BLOCK_D = [[("branch3x3_1", 192, 1), ("branch3x3_2/2", 320, 3)],  # 17 × 17 to 8 × 8
           [("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, (1, 7)), ("branch7x7x3_3", 192, (7, 1)),
            ("branch7x7x3_4/2", 192, 3)],
           ["max"]]
BLOCK_E = [[("branch1x1", 320, 1)],  # 8 × 8
           [("branch3x3_1", 384, 1), [("branch3x3_2a", 384, (1, 3)), ("branch3x3_2b", 384, (3, 1))]],
           [("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3),
            [("branch3x3dbl_3a", 384, (1, 3)), ("branch3x3dbl_3b", 384, (3, 1))]],
           ["avg", ("branch_pool", 192, 1)]]
BLOCKS = {"Mixed_5b": block_a(32), "Mixed_5c": block_a(64), "Mixed_5d": block_a(64), "Mixed_6a": BLOCK_B,
          "Mixed_6b": block_c(128), "Mixed_6c": block_c(160), "Mixed_6d": block_c(160), "Mixed_6e": block_c(192),
          "Mixed_7a": BLOCK_D, "Mixed_7b": BLOCK_E, "Mixed_7c": BLOCK_E}


class Auxiliary(nn.Module):
    """A second classifier in mid-network, for better gradients early on; it needs images of 299 × 299."""

    def __init__(self, inputs, width, classes):
        super().__init__()
        self.conv0 = Conv(inputs, narrow(128, width), 1)
        self.conv1 = Conv(narrow(128, width), narrow(768, width), 5)
        self.fc = nn.Linear(narrow(768, width), classes)

    def forward(self, x):
        x = self.conv1(self.conv0(F.avg_pool2d(x, 5, 3)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class InceptionV3(nn.Module):
    """Takes images from -1 to 1; while training, gives the logits and, with an auxiliary head, that head's too."""

    def __init__(self, classes=1000, width=1.0, auxiliary=True, dropout=0.5):
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, narrow(32, width), 3, 2)
        self.Conv2d_2a_3x3 = Conv(narrow(32, width), narrow(32, width), 3)
        self.Conv2d_2b_3x3 = Conv(narrow(32, width), narrow(64, width), 3, 1, 1)
        self.Conv2d_3b_1x1 = Conv(narrow(64, width), narrow(80, width), 1)
        self.Conv2d_4a_3x3 = Conv(narrow(80, width), narrow(192, width), 3)
        channels = narrow(192, width)
        for name, branches in BLOCKS.items():
            block = Mixed(channels, width, branches)
            self.add_module(name, block)
            channels = block.outputs
            if name == "Mixed_6e":
                self.AuxLogits = Auxiliary(channels, width, classes) if auxiliary else None
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)
        self._initialise()

    def _initialise(self):
        """As the paper's own code has it: normal, cut at two standard deviations, of 0.1 where nothing else is said."""
        special = {"AuxLogits.conv1.conv": 0.01, "AuxLogits.fc": 0.001}
        for name, module in self.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, 0.0, special.get(name, 0.1), -2, 2)

    def forward(self, x):
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        extra = None
        for name in BLOCKS:
            x = getattr(self, name)(x)
            if name == "Mixed_6e" and self.training and self.AuxLogits is not None:
                extra = self.AuxLogits(x)
        x = self.fc(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return x if extra is None else (x, extra)


class Bottleneck(nn.Module):
    """Three convolutions around which the input goes unchanged."""

    def __init__(self, inputs, inner, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner)
        self.downsample = None
        if stride != 1 or inputs != 4 * inner:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * inner, 1, stride, bias=False),
                                            nn.BatchNorm2d(4 * inner))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


class ResNet50(nn.Module):
    """25,557,032 parameters with 1000 classes ("Deep Residual Learning for Image Recognition", He and others, 2015)."""

    def __init__(self, classes=1000, width=1.0):
        super().__init__()
        channels = narrow(64, width)
        self.conv1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        for k, depth in enumerate((3, 4, 6, 3)):
            inner = narrow(64 * 2 ** k, width)
            blocks = []
            for b in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if b == 0 and k else 1))
                channels = 4 * inner
            self.add_module(f"layer{k + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build(name, classes, width, size):
    """The network of this name for images of this size; the auxiliary head is left out where it does not fit."""
    if name == "resnet50":
        return ResNet50(classes, width)
    return InceptionV3(classes, width, auxiliary=size >= 299)
